// Runs, or learners of runs, side by side: settings that differ, key numbers, curves.

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
/** @typedef {{ run: string, learner: string }} Compared an empty learner: the one with the most steps */

/**
 * The address names the others as RUN or RUN/LEARNER, separated by commas.
 * @param {import("../app").ViewProps} props
 */
export function CompareView({ run, runs, live, query }) {
  const unnamed = runs.find((each) => each.run !== run)?.run;
  const named = query.others === undefined ? (unnamed ?? "") : query.others;
  const others = named.split(",").filter(Boolean).map((text) => {
    const at = text.indexOf("/");
    return at < 0 ? { run: text, learner: "" } : { run: text.slice(0, at), learner: text.slice(at + 1) };
  });
  const compared = [{ run, learner: query.learner ?? "" }, ...others];
  // Each has hooks of its own, so another number of them is another component.
  return html`<${Sides} key=${compared.length} compared=${compared} runs=${runs} live=${live} query=${query} />`;
}

/** @param {{ compared: Compared[], runs: import("../contract").RunEntry[], live: import("../lib/live").Live, query: Record<string, string> }} props */
function Sides({ compared, runs, live, query }) {
  const [first] = compared;
  const streams = compared.map((side) => useLive(side.run === first.run ? "" : side.run));
  const lives = streams.map((each, i) => (compared[i].run === first.run ? live : each));
  const answers = compared.map((side, i) => useAnswer(address(side.run, "series", { learner: side.learner, points: 600 }), lives[i].tick));
  const settings = compared.map((side) => useAnswer(address(side.run, "settings")).data);
  const learners = answers.map((answer, i) => String(answer.data?.learner ?? compared[i].learner));
  const keys = compared.map((side, i) => `${side.run}/${learners[i]}`);
  const distinct = compared.map((_, i) => i).filter((i) => keys.indexOf(keys[i]) === i);
  const ofRun = compared.map((_, i) => i).filter((i) => compared.findIndex((side) => side.run === compared[i].run) === i);
  const names = compared.map((side, i) => {
    const shared = compared.some((other, j) => other.run === side.run && learners[j] !== learners[i]);
    return !shared ? side.run : ofRun.length > 1 ? `${side.run} ${learners[i]}` : learners[i];
  });
  const series = answers.map((answer) => answer.data?.series);
  const sides = useMemo(() => distinct.map((i) => ({ name: names[i], series: series[i] ?? [] })), [...series, names.join("\n")]);
  /** @param {Compared[]} next */
  const change = ([{ learner }, ...rest]) =>
    replaceQuery({ learner, others: rest.map((side) => (side.learner ? `${side.run}/${side.learner}` : side.run)).join(",") || "," });
  const failure = [...answers, ...streams].find((each) => each.error)?.error;
  const runNames = ofRun.map((i) => compared[i].run);
  const overviews = ofRun.map((i) => lives[i].overview);
  const runSettings = ofRun.map((i) => settings[i]);
  return html`
    <${Panel} title="Compare" note="runs, or learners of a run">
      <form class="filters" onSubmit=${(/** @type {Event} */ event) => event.preventDefault()}>
        ${compared.map(
          (side, i) => html`<${Choice} key=${i} side=${side} runs=${runs} fixed=${i === 0} answer=${answers[i].data}
              onChange=${(/** @type {Compared} */ chosen) => change(compared.map((each, j) => (j === i ? chosen : each)))}
              onRemove=${() => change(compared.filter((_, j) => j !== i))} />`,
        )}
        <label>Add <select value="" onChange=${(/** @type {Event} */ event) =>
          change([...compared, { run: /** @type {HTMLSelectElement} */ (event.target).value, learner: "" }])}>
          <option value="">a run</option>
          ${runs.map((each) => html`<option value=${each.run}>${each.run}</option>`)}
        </select></label>
      </form>
      ${distinct.length === 1 ? html`<${Empty}>There is nothing to compare it with: serve a second run with <code>rollstream ui --run A --run B</code>, or choose another learner.<//>` : null}
      ${failure ? html`<${Failure} error=${failure} />` : null}
    <//>
    ${runNames.length > 1 && runSettings.every(Boolean) ? html`<${SettingsPanel} names=${runNames} sides=${runSettings} />` : null}
    ${runNames.length > 1 && overviews.every(Boolean)
      ? html`<${Panel} title="Key numbers" note="reward and success of the newest rollouts"><${Numbers} names=${runNames} overviews=${overviews} /><//>`
      : null}
    <${Panel} title="Curves" note="each in its colour; drag to zoom">
      ${answers.some((answer) => answer.loading) ? html`<${Loading} what="the curves" />` : html`<${Curves} sides=${sides} query=${query} />`}
    <//>`;
}

/** @param {{ side: Compared, runs: import("../contract").RunEntry[], fixed: boolean, answer: any, onChange: (side: Compared) => void, onRemove: () => void }} props */
function Choice({ side, runs, fixed, answer, onChange, onRemove }) {
  const value = (/** @type {Event} */ event) => /** @type {HTMLSelectElement} */ (event.target).value;
  const learners = /** @type {string[]} */ (answer?.learners ?? []);
  return html`
    ${fixed
      ? null
      : html`<label>With run <select value=${side.run} onChange=${(/** @type {Event} */ event) => onChange({ run: value(event), learner: "" })}>
          ${runs.map((each) => html`<option value=${each.run}>${each.run}</option>`)}
        </select></label>`}
    ${learners.length > 1
      ? html`<label>Learner of ${side.run} <select value=${answer.learner ?? ""} onChange=${(/** @type {Event} */ event) => onChange({ run: side.run, learner: value(event) })}>
          ${learners.map((each) => html`<option value=${each}>${each}</option>`)}
        </select></label>`
      : null}
    ${fixed ? null : html`<button type="button" onClick=${onRemove} aria-label=${`Remove ${side.run}`}>Remove</button>`}`;
}

/** @param {{ names: string[], overviews: Overview[] }} props */
function Numbers({ names, overviews }) {
  const tops = overviews.map((each) => each.top);
  const dropped = tops.map((top) => Object.values(top.dropped).reduce((sum, n) => sum + n, 0));
  const rows = [
    ["Mean reward", ...tops.map((top) => number(top.rollouts ? top.reward : null, 3))],
    ["Success", ...tops.map((top) => percent(top.rollouts ? top.success : null))],
    ["Step", ...tops.map((top) => count(top.step))],
    ["Policy version", ...tops.map((top) => versionText(top.policy_version))],
    ["Rollouts", ...tops.map((top) => count(top.rollouts))],
    ["Trained", ...tops.map((top) => count(top.trained))],
    ["Skipped", ...tops.map((top) => count(top.skipped))],
    ["Dropped", ...dropped.map((n, i) => `${count(n)} (${percent(tops[i].rollouts ? n / tops[i].rollouts : null)})`)],
    ["Dead letters", ...tops.map((top) => count(top.dead_lettered))],
    ["State", ...overviews.map((each) => (each.live ? "live" : "quiet"))],
  ];
  return html`<${Table} caption="Key numbers of the runs" heads=${[{ text: "Figure", quiet: true }, ...names.map((text) => ({ text, number: true }))]} rows=${rows} />`;
}
