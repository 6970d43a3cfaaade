// The curves of a learner, or of two side by side: one chart for each group of series, the important ones first.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { duration, number, rate, words } from "../lib/format.js";
import { Empty } from "./basics.js";
import { Chart } from "./chart.js";

/** @typedef {import("../contract").Series} Series */
/** @typedef {{ name: string, series: Series[] }} Side */

const FIRST = ["reward", "success", "length", "truncated", "loss", "kl", "entropy", "mismatch", "staleness", "tokens", "step_s", "time"];
const MOST_CURVES = 10;
const TITLES = /** @type {Record<string, string>} */ ({
  kl: "KL divergence",
  success: "Success by environment",
  length: "Tokens of a rollout",
  truncated: "Share truncated",
  mismatch: "Mismatch of trainer and sampler",
  staleness: "Staleness",
  tokens_per_s: "Tokens per second",
  step_s: "Step time by stage",
});

/** @param {{ sides: Side[] }} props */
export function Curves({ sides }) {
  const [every, setEvery] = useState(false);
  const charts = useMemo(() => chartsOf(sides, every), [sides, every]);
  const [all, setAll] = useState(false);
  if (charts.length === 0) return html`<${Empty}>No step is on record yet.<//>`;
  const important = charts.filter((chart) => chart.rank < FIRST.length);
  const rest = charts.filter((chart) => chart.rank >= FIRST.length);
  const shown = all || important.length === 0 ? charts : important;
  return html`
    <div class="charts">
      ${shown.map(
        (chart) => html`<${Chart} key=${chart.title} title=${chart.title} note=${chart.hidden ? `${chart.hidden} more not drawn` : ""} curves=${chart.curves} sync="step"
          format=${chart.format} zero=${chart.zero} />`,
      )}
    </div>
    <p class="more">
      ${important.length && rest.length
        ? html`<button type="button" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Fewer charts" : `${rest.length} more charts`}</button>`
        : null}
      ${every || shown.some((chart) => chart.hidden)
        ? html`<button type="button" aria-pressed=${every} onClick=${() => setEvery(!every)}>All curves of each chart</button>`
        : null}
    </p>`;
}

/**
 * @param {Side[]} sides
 * @param {boolean} every whether a chart draws all its curves
 */
function chartsOf(sides, every) {
  /** @type {Map<string, Map<string, { side: number, series: Series }[]>>} by group of series and label */
  const groups = new Map();
  for (const [side, { series: all }] of sides.entries()) {
    for (const series of all) {
      if (series.x.length === 0) continue;
      const labels = groups.get(series.group) ?? new Map();
      groups.set(series.group, labels);
      const label = short(series.name, series.group);
      labels.set(label, [...(labels.get(label) ?? []), { side, series }]);
    }
  }
  const charts = [...groups].map(([group, byLabel]) => {
    const rank = FIRST.findIndex((name) => group.toLowerCase().startsWith(name));
    const labels = [...byLabel].sort(([a], [b]) => Number(isOverall(b, group)) - Number(isOverall(a, group)));
    const kept = every ? labels : labels.slice(0, Math.floor(MOST_CURVES / sides.length));
    return {
      title: titleOf(group),
      hidden: labels.length - kept.length,
      // Of two sides, the colour says which series, and the pattern which side.
      curves: kept.flatMap(([label, held], color) =>
        held.map(({ side, series: { x, y } }) =>
          sides.length > 1 ? { label: `${label} · ${sides[side].name}`, x, y, color, dash: side } : { label, x, y },
        ),
      ),
      rank: rank < 0 ? FIRST.length : rank,
      format: formatOf(group),
      zero: /time|seconds|_s$|tokens|success|length|staleness/.test(group),
    };
  });
  return charts.sort((a, b) => a.rank - b.rank || a.title.localeCompare(b.title));
}

/**
 * Whether a curve is of all rollouts, and so comes before those of single environments.
 * @param {string} label
 * @param {string} group
 */
function isOverall(label, group) {
  return label === "produced" || label === group;
}

/** @param {string} group */
function formatOf(group) {
  if (/per_s|tokens/.test(group)) return rate;
  if (/time|seconds|_s$/.test(group)) return duration;
  return (/** @type {number | null | undefined} */ value) => number(value, 3);
}

/**
 * @param {string} name
 * @param {string} group
 */
function short(name, group) {
  return name.startsWith(`${group}/`) ? name.slice(group.length + 1) : name;
}

/** @param {string} group */
function titleOf(group) {
  if (group in TITLES) return TITLES[group];
  const text = words(group).replaceAll("/", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
