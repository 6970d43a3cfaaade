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
  const charts = useMemo(() => chartsOf(sides), [sides]);
  const [all, setAll] = useState(false);
  if (charts.length === 0) return html`<${Empty}>No step is on record yet.<//>`;
  const important = charts.filter((chart) => chart.rank < FIRST.length);
  const rest = charts.filter((chart) => chart.rank >= FIRST.length);
  const shown = all || important.length === 0 ? charts : important;
  return html`
    <div class="charts">
      ${shown.map(
        (chart) => html`<${Chart} key=${chart.title} title=${chart.title} note=${chart.note} curves=${chart.curves} sync="step"
          format=${chart.format} zero=${chart.zero} />`,
      )}
    </div>
    ${important.length && rest.length
      ? html`<p class="more"><button type="button" aria-expanded=${all} onClick=${() => setAll(!all)}>
          ${all ? "Fewer curves" : `${rest.length} more curves`}
        </button></p>`
      : null}`;
}

/** @param {Side[]} sides */
function chartsOf(sides) {
  /** @type {Map<string, import("./chart").Curve[]>} */
  const groups = new Map();
  for (const [i, side] of sides.entries()) {
    for (const series of side.series) {
      if (series.x.length === 0) continue;
      const curves = groups.get(series.group) ?? [];
      const label = short(series.name, series.group);
      const curve = { label, x: series.x, y: series.y };
      // Of two sides, the colour says which series, and the pattern which side.
      if (side.name) curves.push({ ...curve, label: `${label} · ${side.name}`, color: colorOf(curves, label), dash: i });
      else curves.push(curve);
      groups.set(series.group, curves);
    }
  }
  const charts = [...groups].map(([group, curves]) => {
    const rank = FIRST.findIndex((name) => group.toLowerCase().startsWith(name));
    const kept = curves.slice(0, MOST_CURVES);
    const hidden = curves.length - kept.length;
    return {
      title: titleOf(group),
      note: hidden > 0 ? `${hidden} more not drawn` : "",
      curves: kept,
      rank: rank < 0 ? FIRST.length : rank,
      format: formatOf(group),
      zero: /time|seconds|_s$|tokens|success|length|staleness/.test(group),
    };
  });
  return charts.sort((a, b) => a.rank - b.rank || a.title.localeCompare(b.title));
}

/**
 * @param {import("./chart").Curve[]} curves
 * @param {string} label
 */
function colorOf(curves, label) {
  const same = curves.find((curve) => curve.label.startsWith(`${label} · `));
  return same?.color ?? new Set(curves.map((curve) => curve.color)).size;
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
