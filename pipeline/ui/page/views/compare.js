// Two runs, or two learners, side by side: key numbers and curves.

import { html, useMemo } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, number, percent, versionText } from "../lib/format.js";
import { useLive } from "../lib/live.js";
import { replaceQuery } from "../lib/route.js";
import { Empty, Failure, Loading, Panel, Table } from "../parts/basics.js";
import { Curves } from "../parts/curves.js";
import { SettingsPanel } from "../parts/settings.js";

/** @typedef {import("../contract").Overview} Overview */

/** @param {import("../app").ViewProps} props */
export function CompareView({ run, runs, live, query }) {
  const other = query.other || runs.find((each) => each.run !== run)?.run || run;
  const ours = useAnswer(address(run, "series", { learner: query.learner, points: 600 }), live.tick);
  const otherLive = useLive(other === run ? "" : other);
  const second = other === run ? live : otherLive;
  const theirs = useAnswer(address(other, "series", { learner: query.other_learner, points: 600 }), second.tick);
  const compared = other !== run;
  const settings = [run, other].map((each) => useAnswer(compared ? address(each, "settings") : null).data);
  const same = other === run && (ours.data?.learner ?? "") === (theirs.data?.learner ?? "");
  const names = other === run ? [String(ours.data?.learner ?? "first"), String(theirs.data?.learner ?? "second")] : [run, other];
  const sides = useMemo(
    () => [
      { name: names[0], series: ours.data?.series ?? [] },
      ...(same ? [] : [{ name: names[1], series: theirs.data?.series ?? [] }]),
    ],
    [ours.data, theirs.data, names.join("\n"), same],
  );
  const change = (/** @type {string} */ name) => (/** @type {Event} */ event) =>
    replaceQuery({ [name]: /** @type {HTMLSelectElement} */ (event.target).value, ...(name === "other" ? { other_learner: "" } : {}) });
  const learnerChoice = (/** @type {string} */ label, /** @type {string} */ name, /** @type {any} */ data) => html`<label>${label}
    <select value=${data?.learner ?? ""} onChange=${change(name)}>
      ${(data?.learners ?? []).map((/** @type {string} */ each) => html`<option value=${each}>${each}</option>`)}
    </select></label>`;
  const failure = ours.error ?? theirs.error ?? otherLive.error;
  return html`
    <${Panel} title="Compare" note="this run with another, or two of its learners">
      <form class="filters" onSubmit=${(/** @type {Event} */ event) => event.preventDefault()}>
        ${learnerChoice(`Learner of ${run}`, "learner", ours.data)}
        <label>With run <select value=${other} onChange=${change("other")}>
          ${runs.map((each) => html`<option value=${each.run}>${each.run}</option>`)}
        </select></label>
        ${learnerChoice("Its learner", "other_learner", theirs.data)}
      </form>
      ${same ? html`<${Empty}>There is nothing to compare it with: serve a second run with <code>rollstream ui --run A --run B</code>, or choose another learner.<//>` : null}
      ${failure ? html`<${Failure} error=${failure} />` : null}
      ${other !== run && live.overview && second.overview ? html`<${Numbers} names=${names} both=${[live.overview, second.overview]} />` : null}
    <//>
    ${settings[0] && settings[1] ? html`<${SettingsPanel} names=${names} sides=${settings} />` : null}
    <${Panel} title="Curves" note="the second one dashed">
      ${ours.loading || theirs.loading ? html`<${Loading} what="the curves" />` : html`<${Curves} sides=${sides} />`}
    <//>`;
}

/** @param {{ names: string[], both: Overview[] }} props */
function Numbers({ names, both }) {
  const tops = both.map((each) => each.top);
  const dropped = tops.map((top) => Object.values(top.dropped).reduce((sum, n) => sum + n, 0));
  const rows = [
    ["Mean reward, newest rollouts", ...tops.map((top) => number(top.reward, 3))],
    ["Exact, newest rollouts", ...tops.map((top) => percent(top.exact))],
    ["Step", ...tops.map((top) => count(top.step))],
    ["Policy version", ...tops.map((top) => versionText(top.policy_version))],
    ["Rollouts", ...tops.map((top) => count(top.rollouts))],
    ["Trained", ...tops.map((top) => count(top.trained))],
    ["Skipped", ...tops.map((top) => count(top.skipped))],
    ["Dropped", ...dropped.map((n, i) => `${count(n)} (${percent(tops[i].rollouts ? n / tops[i].rollouts : 0)})`)],
    ["Dead letters", ...tops.map((top) => count(top.dead_lettered))],
    ["State", ...both.map((each) => (each.live ? "live" : "quiet"))],
  ];
  return html`<${Table} caption="Key numbers of both runs" heads=${[{ text: "Figure", quiet: true }, ...names.map((text) => ({ text, number: true }))]} rows=${rows} />`;
}
