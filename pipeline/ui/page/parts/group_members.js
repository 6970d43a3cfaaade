// The members of a group side by side, and their advantages under every estimator.

import { html, useState } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, number, signed, words } from "../lib/format.js";
import { link, parse } from "../lib/route.js";
import { Empty, Fate, shown, Table } from "./basics.js";

/** @typedef {import("../contract").Row} Row */
/** @typedef {import("../contract").Estimator} Estimator */

/** @param {{ run: string, place: string, members: Row[] }} props */
export function GroupMembers({ run, place, members }) {
  const [whole, setWhole] = useState(false);
  if (members.length === 0) return html`<${Empty}>The members of its group are not known yet.<//>`;
  const { query } = parse(location.hash);
  return html`
    <label class="check"><input type="checkbox" checked=${whole} onChange=${() => setWhole(!whole)} /> whole answers</label>
    <div class="members" tabindex="0" role="region" aria-label="Members of the group">
      ${members.map((member) => html`<section class=${member.place === place ? "member this" : "member"} key=${member.place} aria-label=${`Member ${member.place}`}>
        <p class="member-head">
          ${member.place === place ? html`<strong>this one</strong>` : html`<a href=${link(run, "rollouts", { ...query, open: member.place })}>${member.place}</a>`}
          <span class="n">reward <strong>${number(member.reward, 3)}</strong></span>
          <span class="n">advantage <strong>${signed(member.advantage)}</strong></span>
        </p>
        <p class="member-notes"><${Fate} fate=${member.fate} reason=${member.reason} />, ${count(member.length)} tokens${member.truncated ? ", truncated" : ""}</p>
        ${whole ? html`<${Answer} run=${run} place=${member.place} />` : html`<p class="member-text">${member.preview}</p>`}
      </section>`)}
    </div>`;
}

/** @param {{ run: string, place: string }} props */
function Answer({ run, place }) {
  const answer = useAnswer(address(run, `rollouts/${place.replace(":", "/")}`));
  return shown(answer, (/** @type {import("../contract").RolloutAnswer} */ found) => {
    const first = found.turns.findIndex((turn) => turn.has_logprobs);
    const turns = first < 0 ? found.turns : found.turns.slice(first);
    return turns.map((turn) => html`<p class="member-text"><span class="role">${turn.role}</span> ${turn.text}</p>`);
  });
}

/** @param {{ run: string, place: string, uid: string }} props */
export function Estimators({ run, place, uid }) {
  const [open, setOpen] = useState(false);
  return html`<details class="section" onToggle=${(/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.target).open)}>
    <summary>Advantages under other estimators</summary>
    ${open ? html`<${EstimatorTable} run=${run} place=${place} uid=${uid} />` : null}
  </details>`;
}

/** @param {{ run: string, place: string, uid: string }} props */
function EstimatorTable({ run, place, uid }) {
  const answer = useAnswer(address(run, `rollouts/${place.replace(":", "/")}/estimators`));
  return shown(
    answer,
    (/** @type {{ estimators: Estimator[] }} */ { estimators }) => {
      const uids = estimators[0]?.group.map((each) => each.uid) ?? [];
      return html`<${Table} caption="Advantages by estimator" empty="Its group is not complete, so it has no advantages."
        heads=${["Estimator", { text: "This one", number: true }, ...uids.filter((each) => each !== uid).map((each) => ({ text: each, number: true }))]}
        rows=${estimators.map((each) => [
          words(each.name),
          html`<strong>${signed(each.advantage)}</strong>`,
          ...uids.filter((other) => other !== uid).map((other) => signed(each.group.find((member) => member.uid === other)?.advantage)),
        ])} />`;
    },
    "the estimators",
  );
}
