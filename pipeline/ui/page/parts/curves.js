// The curves of learners, of one or of several side by side: one chart for each group of series, the important ones first.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { duration, number, rate, words } from "../lib/format.js";
import { replaceQuery } from "../lib/route.js";
import { Empty } from "./basics.js";
import { Chart } from "./chart.js";

/** @typedef {import("../contract").Series} Series */
/** @typedef {{ name: string, series: Series[] }} Side */

const FIRST = ["reward", "success", "length", "truncated", "loss", "kl", "entropy", "mismatch", "staleness", "tokens", "step_s", "time"];
const MOST_CURVES = 10;
const WEIGHTS = [0.6, 0.9, 0.97];
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

/**
 * `smooth` and `environment` of the query say how the curves are drawn.
 * @param {{ sides: Side[], query: Record<string, string> }} props
 */
export function Curves({ sides, query }) {
  const [every, setEvery] = useState(false);
  const weight = Math.min(Math.max(Number(query.smooth) || 0, 0), 0.999);
  const environments = useMemo(() => environmentsOf(sides), [sides]);
  const environment = environments.includes(query.environment) ? query.environment : "";
  const charts = useMemo(() => chartsOf(sides, every, weight, environment), [sides, every, weight, environment]);
  const [all, setAll] = useState(false);
  if (charts.length === 0) return html`<${Empty}>No step is on record yet.<//>`;
  const important = charts.filter((chart) => chart.rank < FIRST.length);
  const rest = charts.filter((chart) => chart.rank >= FIRST.length);
  const shown = all || important.length === 0 ? charts : important;
  const choose = (/** @type {string} */ name) => (/** @type {Event} */ event) => replaceQuery({ [name]: /** @type {HTMLSelectElement} */ (event.target).value });
  return html`
    <form class="filters" onSubmit=${(/** @type {Event} */ event) => event.preventDefault()}>
      <label>Smoothing <select value=${weight || ""} onChange=${choose("smooth")}>
        ${["", ...WEIGHTS].map((each) => html`<option value=${each}>${each || "none"}</option>`)}
      </select></label>
      ${environments.length > 1
        ? html`<label>Environment <select value=${environment} onChange=${choose("environment")}>
            ${["", ...environments].map((each) => html`<option value=${each}>${each || "all"}</option>`)}
          </select></label>`
        : null}
    </form>
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
 * @returns {string[]}
 */
function environmentsOf(sides) {
  const names = sides.flatMap((side) => side.series.filter((each) => each.group === "success").map((each) => each.name.replace(/^success\/(evaluated\/)?/, "")));
  return [...new Set(names)].sort();
}

/**
 * @param {Side[]} sides
 * @param {boolean} every whether a chart draws all its curves
 * @param {number} weight of the mean so far in a smoothed curve
 * @param {string} environment draw only its curves where a chart has some; empty: all
 */
function chartsOf(sides, every, weight, environment) {
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
    const own = [...byLabel].filter(([label]) => label === environment || label === `evaluated/${environment}`);
    const labels = own.length > 0 ? own : [...byLabel].sort(([a], [b]) => Number(isOverall(b, group)) - Number(isOverall(a, group)));
    const kept = every ? labels : labels.slice(0, Math.max(1, Math.floor(MOST_CURVES / sides.length)));
    return {
      title: titleOf(group),
      hidden: labels.length - kept.length,
      // Of several sides, the colour says which side, and the pattern which series.
      curves: kept.flatMap(([label, held], dash) =>
        held.map(({ side, series: { x, y } }) => ({
          ...(sides.length > 1 ? { label: `${label} · ${sides[side].name}`, color: side, dash } : { label }),
          x,
          y,
          drawn: weight > 0 ? smoothed(y, weight) : y,
        })),
      ),
      rank: rank < 0 ? FIRST.length : rank,
      format: formatOf(group),
      zero: /time|seconds|_s$|tokens|success|length|staleness/.test(group),
    };
  });
  return charts.sort((a, b) => a.rank - b.rank || a.title.localeCompare(b.title));
}

/**
 * The exponential moving average of a curve, divided by the weight of the values it has seen (as Adam's moments are), so
 * that it does not begin at zero.
 * @param {(number | null)[]} y
 * @param {number} weight
 */
function smoothed(y, weight) {
  let mean = 0;
  let seen = 0;
  return y.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return mean / seen;
  });
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
