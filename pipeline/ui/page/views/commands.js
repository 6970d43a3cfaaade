// Commands to the run. Each is asked about before it is recorded.

import { html, useState } from "../vendor/preact-htm.js";
import { address, postJson } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { plain, words } from "../lib/format.js";
import { Confirm, Empty, Facts, Failure, Loading, Panel, shown } from "../parts/basics.js";
import { COMMANDS, bodyOf } from "../parts/command_forms.js";

/** @typedef {import("../parts/command_forms").Form} Form */

/** @param {import("../app").ViewProps} props */
export function CommandsView({ run, live }) {
  const [sent, setSent] = useState(0);
  const wanted = useAnswer(live.overview?.commands ? address(run, "commands") : null, live.tick + sent);
  if (!live.overview) return html`<${Loading} what="the run" />`;
  if (!live.overview.commands) {
    return html`<${Panel} title="Commands"><${Empty}>This server takes no commands for this run: it is an archive, or the page was started without them.<//><//>`;
  }
  return html`
    <${Panel} title="What is wanted now" note="as recorded on the topic control">
      ${shown(wanted, (data) => html`<${Wanted} state=${data.state} />`, "what is wanted")}
    <//>
    <${Panel} title="Commands" note="each is recorded on the log, and carried out by the processes that follow it">
      <div class="commands">
        ${COMMANDS.map((form) => html`<${Command} key=${form.name} form=${form} run=${run} onSent=${() => setSent((n) => n + 1)} />`)}
      </div>
    <//>`;
}

/** @param {{ state: Record<string, unknown> }} props */
function Wanted({ state }) {
  const items = Object.entries(state ?? {}).map(([name, value]) => /** @type {[string, string]} */ ([words(name), textOf(value)]));
  return items.length ? html`<${Facts} items=${items} />` : html`<${Empty}>Nothing is wanted beside the settings of the run.<//>`;
}

/** @param {unknown} value */
function textOf(value) {
  if (Array.isArray(value)) return value.length ? value.map(plain).join(", ") : "none";
  if (value !== null && typeof value === "object") {
    const parts = Object.entries(value).map(([key, each]) => `${words(key)} ${plain(each)}`);
    return parts.length ? parts.join(", ") : "as in the settings";
  }
  return plain(value);
}

/** @param {{ form: Form, run: string, onSent: () => void }} props */
function Command({ form, run, onSent }) {
  const [values, setValues] = useState(/** @type {Record<string, string>} */ (Object.fromEntries(form.fields.map((each) => [each.name, each.choices?.[0] ?? ""]))));
  const [asking, setAsking] = useState(false);
  const [busy, setBusy] = useState(false);
  const [outcome, setOutcome] = useState("");
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const change = (/** @type {string} */ name) => (/** @type {Event} */ event) =>
    setValues((before) => ({ ...before, [name]: /** @type {HTMLInputElement} */ (event.target).value }));
  const ask = (/** @type {Event} */ event) => {
    event.preventDefault();
    setOutcome("");
    setAsking(true);
  };
  const send = () => {
    setBusy(true);
    postJson(address(run, "commands"), bodyOf(form, values))
      .then((answer) => {
        setOutcome(["Recorded.", answer.said].filter(Boolean).join(" "));
        setFailure(null);
        onSent();
      }, setFailure)
      .finally(() => {
        setBusy(false);
        setAsking(false);
      });
  };
  return html`<form class="command" onSubmit=${ask} aria-label=${form.title}>
    <h3>${form.title}</h3>
    <p class="muted">${form.note}</p>
    ${form.fields.map(
      (each) => html`<label>${each.label}
        ${each.choices
          ? html`<select value=${values[each.name]} onChange=${change(each.name)}>${each.choices.map((name) => html`<option value=${name}>${name}</option>`)}</select>`
          : html`<input type=${each.number ? "number" : "text"} step="any" value=${values[each.name]} onInput=${change(each.name)} required=${!each.optional} placeholder=${each.hint ?? ""} autocomplete="off" spellcheck="false" />`}
      </label>`,
    )}
    <button type="submit">${form.title}…</button>
    <p class="outcome" role="status" aria-live="polite">${outcome}</p>
    ${failure ? html`<${Failure} error=${failure} />` : null}
    ${asking
      ? html`<${Confirm} title=${`${form.title}?`} confirm=${form.title} busy=${busy} onConfirm=${send} onCancel=${() => setAsking(false)}>
          <p>${form.note}</p>
          ${form.fields.length ? html`<${Facts} items=${form.fields.map((each) => [each.label, values[each.name] || "–"])} />` : null}
        <//>`
      : null}
  </form>`;
}
