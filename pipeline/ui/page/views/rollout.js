// One rollout: what was said, its tokens, its group side by side, other estimators, its fate and lineage.

import { html, useRef, useState } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, number, plain, signed, time, versionText, words } from "../lib/format.js";
import { link } from "../lib/route.js";
import { Facts, Fate, shown } from "../parts/basics.js";
import { Estimators, GroupMembers } from "../parts/group_members.js";
import { Lineage } from "../parts/lineage.js";
import { TokenStrip } from "../parts/tokens.js";

/** @typedef {import("../contract").RolloutAnswer} RolloutAnswer */
/** @typedef {import("../contract").Row} Row */

/** @param {{ run: string, place: string, tick: number, onClose: () => void }} props */
export function OneRollout({ run, place, tick, onClose }) {
  const settled = useRef(false);
  // A fate that is final does not change, so the record is not read again.
  const answer = useAnswer(address(run, `rollouts/${place.replace(":", "/")}`), settled.current ? 0 : tick);
  const data = /** @type {RolloutAnswer | null} */ (answer.data);
  if (data && ["trained", "skipped", "dropped", "dead_lettered"].includes(data.row.fate)) settled.current = true;
  return html`<article class="split-detail panel" aria-labelledby="rollout-title">
    <div class="detail-head">
      <h2 id="rollout-title">Rollout ${place}</h2>
      <button type="button" onClick=${onClose} aria-label="Close the rollout">Close</button>
    </div>
    ${shown(answer, (/** @type {RolloutAnswer} */ found) => html`<${Details} run=${run} place=${place} found=${found} />`, "the rollout")}
  </article>`;
}

/** @param {{ run: string, place: string, found: RolloutAnswer }} props */
function Details({ run, place, found }) {
  const { row } = found;
  const [start, setStart] = useState(/** @type {number | null} */ (null));
  return html`
    <${Facts} items=${factsOf(row, run, found.components)} />
    <h3>Conversation</h3>
    <${Conversation} turns=${found.turns} onTokens=${setStart} />
    <${Images} run=${run} place=${place} media=${found.media} />
    <h3>Tokens <span class="muted">${count(found.tokens.total)}, ${count(row.sampled)} sampled</span></h3>
    <${TokenStrip} tokens=${found.tokens} run=${run} place=${place} start=${start} key=${place} />
    <h3>Group <span class="muted">${count(found.group.length)} members</span></h3>
    <${GroupMembers} run=${run} place=${place} members=${found.group} />
    <${Estimators} run=${run} place=${place} uid=${row.uid} />
    <h3>Lineage</h3>
    <p class="muted">From the version that sampled it to the steps that used it.</p>
    <${Lineage} nodes=${found.lineage.length ? found.lineage : [found.fate]} run=${run} />
    <${Values} title="Sampling" values=${found.sampling} />
    <${Values} title="Arrays" values=${found.arrays} />
    <${Values} title="Further fields" values=${found.extra} />`;
}

/**
 * @param {Row} row
 * @param {string} run
 * @param {Record<string, number>} components
 * @returns {[string, import("../vendor/preact-htm").Child][]}
 */
function factsOf(row, run, components) {
  const parts = Object.entries(components).map(([name, value]) => `${words(name)} ${number(value, 3)}`);
  const versions = row.lowest_version !== row.highest_version ? `${versionText(row.version)}, tokens by v${row.lowest_version} to v${row.highest_version}` : versionText(row.version);
  return [
    ["Fate", html`<${Fate} fate=${row.fate} reason=${row.reason} />`],
    ["Reward", `${number(row.reward)}${parts.length ? ` (${parts.join(", ")})` : ""}`],
    ["Advantage", signed(row.advantage)],
    ["Environment", html`<a href=${link(run, "rollouts", { environment: row.environment })}>${row.environment}</a>`],
    ["Example", html`<a href=${link(run, "rollouts", { environment: row.environment, example: row.example })}>${row.example}</a>`],
    ["Version", html`<a href=${link(run, "rollouts", { version: row.version })}>${versions}</a>`],
    ["Tokens", `${count(row.length)}, ${count(row.sampled)} sampled${row.truncated ? ", truncated" : ""}`],
    ["Worker", row.worker ? html`<a href=${link(run, "rollouts", { worker: row.worker })}>${row.worker}</a>` : "–"],
    ["Batch", row.batch ? html`<a href=${link(run, "rollouts", { batch: row.batch })}>${row.batch}</a>` : "–"],
    ["Step", row.step !== null ? html`<a href=${link(run, "rollouts", { step: row.step })}>${count(row.step)}</a>` : "–"],
    ["Written", time(row.time_ms)],
    ["Uid", html`<code>${row.uid}</code>`],
  ];
}

/** @param {{ turns: import("../contract").Turn[], onTokens: (start: number) => void }} props */
function Conversation({ turns, onTokens }) {
  if (turns.length === 0) return html`<p class="empty">The record has no turns.</p>`;
  return html`<div class="conversation">
    ${turns.map(
      (turn, i) => html`<div class=${`turn turn-${turn.role}`} key=${i}>
        <p class="turn-head">
          <span class="role">${turn.role}</span>
          <button type="button" class="link" onClick=${() => onTokens(turn.start)}>tokens ${turn.start} to ${turn.stop}</button>
          ${turn.has_logprobs ? html`<span class="muted">sampled${known(turn.model_version) ? ` by ${versionText(turn.model_version)}` : ""}</span>` : null}
          ${turn.reward ? html`<span class="muted">reward ${number(turn.reward, 3)}</span>` : null}
        </p>
        <p class="turn-text">${turn.text}</p>
      </div>`,
    )}
  </div>`;
}

/** @param {{ run: string, place: string, media: import("../contract").Medium[] }} props */
function Images({ run, place, media }) {
  const path = `rollouts/${place.replace(":", "/")}/media`;
  return media.map(
    ({ number, text, digest }) => html`<figure class="medium" key=${number}>
      <img src=${address(run, `${path}/${number}`)} alt=${`blake3:${digest}`} loading="lazy" />
      <figcaption class="muted">${text}</figcaption>
    </figure>`,
  );
}

/** @param {number | string | null} version */
function known(version) {
  return version !== null && version !== "" && version !== -1;
}

/** @param {{ title: string, values: Record<string, unknown> }} props */
function Values({ title, values }) {
  const items = Object.entries(values ?? {}).map(([name, value]) => /** @type {[string, string]} */ ([words(name), plain(value)]));
  if (items.length === 0) return null;
  return html`<details class="section"><summary>${title}</summary><${Facts} items=${items} /></details>`;
}
