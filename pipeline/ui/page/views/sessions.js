// Sessions of the gateway: their states, and for one of them its events and model calls in order.

import { html } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, duration, plain, time, versionText, words } from "../lib/format.js";
import { usePages } from "../lib/pages.js";
import { link, replaceQuery } from "../lib/route.js";
import { Empty, Facts, Failure, More, Panel, shown, Table } from "../parts/basics.js";

/** @typedef {import("../contract").Session} Session */
/** @typedef {import("../contract").SessionAnswer} SessionAnswer */

const STATES = ["open", "waits_for_reward", "closing", "finished", "cancelled"];

/** @param {import("../app").ViewProps} props */
export function SessionsView({ run, live, query }) {
  const { state = "", open = "" } = query;
  /** @type {ReturnType<typeof usePages<Session>>} */
  const pages = usePages((after) => address(run, "sessions", { state, after, limit: 100 }), live.tick);
  const change = (/** @type {Event} */ event) => replaceQuery({ state: /** @type {HTMLSelectElement} */ (event.target).value });
  const states = [...new Set([...STATES, ...(state ? [state] : []), ...pages.rows.map((each) => each.state)])];
  return html`
    <${Panel} title="Sessions" note="of agents that call the gateway">
      <form class="filters" onSubmit=${(/** @type {Event} */ event) => event.preventDefault()}>
        <label>State <select value=${state} onChange=${change}>
          <option value="">all</option>
          ${states.map((name) => html`<option value=${name}>${words(name)}</option>`)}
        </select></label>
      </form>
      ${shown(
        pages.first,
        () => html`
          <${Table} caption="Sessions" empty=${state ? "No session is in this state." : "No agent has opened a session with the gateway."}
            keys=${pages.rows.map((each) => each.session)}
            heads=${["Session", "Environment", "State", { text: "Calls", number: true }, { text: "Rollouts", number: true }, "Began", { text: "Took", number: true }, "Reason"]}
            rows=${pages.rows.map((each) => [
              html`<a href=${link(run, "sessions", { state, open: each.session })} aria-current=${each.session === open ? "true" : undefined}><code>${each.session}</code></a>`,
              each.environment,
              words(each.state),
              count(each.calls),
              count(each.rollouts),
              time(each.began_ms),
              took(each.began_ms, each.ended_ms),
              words(each.reason) || "–",
            ])} />
          ${pages.failure ? html`<${Failure} error=${pages.failure} again=${pages.more} />` : null}
          <${More} more=${pages.hasMore} busy=${pages.busy} onMore=${pages.more} shown=${pages.rows.length} />`,
        "the sessions",
      )}
    <//>
    ${open ? html`<${OneSession} run=${run} session=${open} tick=${live.tick} />` : null}`;
}

/** @param {{ run: string, session: string, tick: number }} props */
function OneSession({ run, session, tick }) {
  const answer = useAnswer(address(run, `sessions/${encodeURIComponent(session)}`), tick);
  const close = html`<button type="button" onClick=${() => replaceQuery({ open: "" })}>Close</button>`;
  return html`<${Panel} title=${`Session ${session}`} id="one-session" actions=${close}>
    ${shown(answer, (data) => html`<${Course} answer=${data} run=${run} />`, "the session")}
  <//>`;
}

/** @param {{ answer: SessionAnswer, run: string }} props */
function Course({ answer, run }) {
  const { session, events, calls } = answer;
  const uids = [...new Set(events.flatMap((each) => (each.kind === "finished" && Array.isArray(each.uids) ? each.uids.map(String) : [])))];
  return html`
    <${Facts} items=${[
      ["Environment", session.environment],
      ["State", `${words(session.state)}${session.reason ? `: ${words(session.reason)}` : ""}`],
      ["Calls", count(session.calls)],
      ["Rollouts", html`${count(session.rollouts)}${uids.map((uid) => html` <a href=${link(run, "rollouts", { uid })}><code>${uid}</code></a>`)}`],
      ["Began", time(session.began_ms)],
      ["Took", took(session.began_ms, session.ended_ms)],
    ]} />
    <h3>Events</h3>
    ${events.length
      ? html`<ol class="notes">${events.map((each) => html`<li>${Object.entries(each).map(([name, value]) => `${words(name)} ${plain(value)}`).join(", ")}</li>`)}</ol>`
      : html`<${Empty}>No events.<//>`}
    <h3>Calls</h3>
    ${calls.length ? null : html`<${Empty}>No calls yet.<//>`}
    ${calls.map(
      (call, i) => html`<details class="call" key=${call.place} open=${i === calls.length - 1}>
        <summary>Call ${i + 1}, ${count(call.tokens)} tokens by ${versionText(call.version)}, ${took(call.began_ms, call.answered_ms)} <code>${call.place}</code></summary>
        <div class="conversation">
          ${call.messages.map((message) => html`<${Message} role=${message.role ?? "message"} content=${message.content} />`)}
          <${Message} role="answer" content=${call.answer} />
        </div>
      </details>`,
    )}`;
}

/** @param {{ role: string, content: unknown }} props */
function Message({ role, content }) {
  const text = typeof content === "string" ? content : JSON.stringify(content, null, 2);
  return html`<div class=${`turn turn-${role === "answer" ? "assistant" : role}`}>
    <p class="turn-head"><span class="role">${role}</span></p>
    <p class="turn-text">${text ?? ""}</p>
  </div>`;
}

/**
 * @param {number | null} from
 * @param {number | null} to
 */
function took(from, to) {
  return from && to ? duration((to - from) / 1000) : "–";
}
