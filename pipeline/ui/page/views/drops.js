// Drops by reason over time; each reason leads to its rollouts.

import { html } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, percent, time, words } from "../lib/format.js";
import { link } from "../lib/route.js";
import { Empty, Panel, shown, Table } from "../parts/basics.js";
import { Bars } from "../parts/bars.js";

/** @param {import("../app").ViewProps} props */
export function DropsView({ run, live }) {
  const answer = useAnswer(address(run, "drops", { buckets: 120 }), live.tick);
  return html`<${Panel} title="Drops by reason" note="each row has a scale of its own">
    ${shown(answer, (data) => html`<${Reasons} drops=${data} run=${run} />`, "the drops")}
  <//>`;
}

/** @param {{ drops: import("../contract").Drops, run: string }} props */
function Reasons({ drops, run }) {
  const names = Object.keys(drops.totals).sort((a, b) => drops.totals[b] - drops.totals[a]);
  const all = names.reduce((sum, name) => sum + drops.totals[name], 0);
  if (all === 0) return html`<${Empty}>Nothing was dropped.<//>`;
  const edges = drops.edges_ms;
  const when = (/** @type {number} */ i) => `${time(edges[i])} to ${time(edges[i + 1] ?? edges[i])}`;
  return html`
    <ul class="reasons">
      ${names.map((name) => {
        const counts = drops.reasons[name] ?? [];
        const most = Math.max(0, ...counts);
        return html`<li key=${name}>
          <div class="reason-head">
            <a href=${link(run, "rollouts", { fate: "dropped", reason: name })}>${words(name)}</a>
            <span class="n">${count(drops.totals[name])}</span>
            <span class="muted n">${percent(drops.totals[name] / all)}</span>
          </div>
          <${Bars} counts=${counts} label=${`${words(name)}: ${drops.totals[name]} dropped, at most ${most} in one interval`}
            titles=${(/** @type {number} */ i) => `${counts[i]} dropped, ${when(i)}`} />
        </li>`;
      })}
    </ul>
    <p class="range muted"><span>${time(edges[0])}</span><span>${time(edges[edges.length - 1])}</span></p>
    <${Table} caption="Drops by reason" showCaption heads=${["Reason", { text: "Rollouts", number: true }, { text: "Share of drops", number: true }, "First", "Last"]}
      rows=${names.map((name) => {
        const counts = drops.reasons[name] ?? [];
        const first = counts.findIndex((n) => n > 0);
        const last = counts.length - 1 - [...counts].reverse().findIndex((n) => n > 0);
        return [words(name), count(drops.totals[name]), percent(drops.totals[name] / all), first < 0 ? "–" : time(edges[first]), first < 0 ? "–" : time(edges[last])];
      })} />`;
}
