// Evaluations: figures of each environment and suite, by version, with their intervals.

import { html } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, number, percent, versionText } from "../lib/format.js";
import { Panel, Table } from "./basics.js";

/** @typedef {import("../contract").Evaluated} Evaluated */

/** @param {{ run: string, tick: number, learner: string }} props */
export function EvaluationsPanel({ run, tick, learner }) {
  const answer = useAnswer(address(run, "evaluations", { learner }), tick);
  const evaluations = /** @type {import("../contract").Evaluations | null} */ (answer.data);
  if (!evaluations?.rows.length) return null;
  const rows = evaluations.rows;
  const shown = new Set(rows.map((each) => each.version)).size;
  const ks = [...new Set(rows.flatMap((each) => Object.keys(each.figures)))].filter((name) => name.startsWith("pass@"));
  ks.sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)));
  const note = `means with 95 % intervals${shown < evaluations.versions ? `; the newest ${shown} of ${count(evaluations.versions)} versions` : ""}`;
  return html`<${Panel} title="Evaluations" note=${note}>
    <${Table} caption="Evaluations, newest first" keys=${rows.map((each) => `${each.version}/${each.phase}/${each.environments === null}/${each.name}`)}
      heads=${["Version", { text: "Step", number: true }, "Environment", { text: "Answers", number: true }, ...["Reward", "Success", ...ks].map((text) => ({ text, number: true }))]}
      rows=${rows.map((each) => [
        versionText(each.version),
        count(each.step),
        html`<span title=${each.environments?.join(", ")}>${each.environments ? `suite ${each.name}` : each.name}</span> ${each.phase}`,
        `${count(each.answers)}${each.answers < each.expected ? ` of ${count(each.expected)}` : ""}, ${each.samples} a prompt`,
        figure(each, "reward", (value) => number(value, 3)),
        ...["success", ...ks].map((name) => figure(each, name, percent)),
      ])} />
  <//>`;
}

/**
 * A mean and its interval.
 * @param {Evaluated} row
 * @param {string} name
 * @param {(value: number) => string} text
 */
function figure(row, name, text) {
  const value = row.figures[name];
  return value ? html`${text(value.mean)} <small>(${text(value.low)} to ${text(value.high)})</small>` : text(NaN);
}
