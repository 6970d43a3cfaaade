// A curve or several over one axis, drawn by uPlot, with its values as text: a summary, a readout, a table.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { number } from "../lib/format.js";
import { useTheme } from "../lib/theme.js";
import { Table } from "./basics.js";

/**
 * `drawn` is drawn in place of `y`, which the table has. `color` and `dash` are numbers of a colour and a pattern;
 * without them each curve of a chart has its own.
 * @typedef {{ label: string, x: number[], y: (number | null)[], drawn?: (number | null)[], color?: number, dash?: number }} Curve
 */

const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [4, 2], [1, 2], [12, 4], [6, 2, 2, 2, 2, 2]];
const COLORS = 8;
const TABLE_ROWS = 60;

/**
 * @param {{ title: string, note?: string, curves: Curve[], xName?: string, height?: number, sync?: string,
 *   zero?: boolean, format?: (value: number | null | undefined) => string }} props
 */
export function Chart({ title, note, curves, xName = "step", height = 150, sync, zero, format = number }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const theme = useTheme();
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const [open, setOpen] = useState(false);
  const data = useMemo(() => joined(curves.map((curve) => ({ ...curve, y: curve.drawn ?? curve.y }))), [curves]);
  const plot = useRef(/** @type {uPlot | null} */ (null));
  const zoom = useRef(/** @type {{ min: number, max: number } | null} */ (null));
  const shape = curves.map((curve) => curve.label).join("\n");

  useLayoutEffect(() => {
    const parent = box.current;
    if (!parent) return undefined;
    const made = new uPlot(options(parent, curves, height, xName, sync, zero, format, setAt), data, parent);
    plot.current = made;
    if (zoom.current) made.setScale("x", zoom.current);
    const observer = new ResizeObserver(() => {
      if (parent.clientWidth > 0) made.setSize({ width: parent.clientWidth, height });
    });
    observer.observe(parent);
    return () => {
      observer.disconnect();
      zoom.current = zoomOf(made);
      made.destroy();
      plot.current = null;
    };
  }, [theme, shape, height]);
  useEffect(() => {
    const drawn = plot.current;
    drawn?.batch(() => {
      const before = zoomOf(drawn);
      drawn.setData(data);
      if (before) drawn.setScale("x", before);
    });
  }, [data]);

  const points = data[0].length;
  const index = at !== null && at < points ? at : null;
  const readout = (/** @type {number} */ i) => {
    const values = /** @type {(number | null | undefined)[]} */ (data[i + 1]);
    return index !== null ? values[index] : last(values);
  };
  return html`<figure class="chart">
    <figcaption>
      <span class="chart-title">${title}</span>
      <span class="chart-at">${index !== null ? `${xName} ${number(data[0][index])}` : (note ?? "")}</span>
    </figcaption>
    <div ref=${box} class="plot" role="img" aria-label=${summary(title, curves, xName, format)}></div>
    <ul class="legend">
      ${curves.map(
        (curve, i) => html`<li key=${curve.label}>
          <${Swatch} color=${curve.color ?? i} dash=${curve.dash ?? i} /><span class="legend-label">${curve.label}</span>
          <span class="legend-value">${format(readout(i))}</span>
        </li>`,
      )}
    </ul>
    <details onToggle=${(/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.target).open)}>
      <summary>Table<span class="hidden"> of ${title}</span></summary>
      ${open ? html`<${Values} title=${title} curves=${curves} xName=${xName} format=${format} />` : null}
    </details>
  </figure>`;
}

/**
 * The range of x that was chosen; null while all points are in view.
 * @param {uPlot} plot
 */
function zoomOf(plot) {
  const { min, max } = plot.scales.x;
  const xs = plot.data[0];
  return min !== undefined && max !== undefined && (min > xs[0] || max < xs[xs.length - 1]) ? { min, max } : null;
}

/** @param {{ color: number, dash: number }} props */
function Swatch({ color, dash }) {
  return html`<svg class=${`swatch c${color % COLORS}`} width="22" height="8" aria-hidden="true">
    <line x1="0" y1="4" x2="22" y2="4" stroke="currentColor" stroke-width="2" stroke-dasharray=${DASHES[dash % DASHES.length].join(" ")} />
  </svg>`;
}

/** @param {{ title: string, curves: Curve[], xName: string, format: (value: number | null | undefined) => string }} props */
function Values({ title, curves, xName, format }) {
  const data = joined(curves);
  const length = data[0].length;
  const stride = Math.max(1, Math.ceil(length / TABLE_ROWS));
  const rows = [];
  for (let i = length - 1; i >= 0; i -= stride) {
    rows.push([number(data[0][i]), ...curves.map((_, j) => format(data[j + 1][i]))]);
  }
  const heads = [xName, ...curves.map((curve) => curve.label)].map((text) => ({ text, number: true }));
  return html`<button type="button" onClick=${() => download(`${title}.csv`, csv(xName, curves, data))}>Download as CSV</button>
    <${Table} caption=${`${title}, newest first${stride > 1 ? `, every ${stride}th point` : ""}`} heads=${heads} rows=${rows} />`;
}

/**
 * @param {string} xName
 * @param {Curve[]} curves
 * @param {any} data
 */
function csv(xName, curves, data) {
  const quoted = (/** @type {string} */ text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = data[0].map((/** @type {number} */ _, /** @type {number} */ i) => data.map((/** @type {any[]} */ column) => column[i] ?? "").join(","));
  return [[xName, ...curves.map((curve) => curve.label)].map(quoted).join(","), ...rows, ""].join("\n");
}

/**
 * @param {string} name
 * @param {string} text
 */
function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

/**
 * @param {Curve[]} curves
 * @returns {any}
 */
function joined(curves) {
  if (curves.length === 0) return [[]];
  const same = curves.every((curve) => curve.x.length === curves[0].x.length && curve.x.every((x, i) => x === curves[0].x[i]));
  if (same) return [curves[0].x, ...curves.map((curve) => curve.y)];
  const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const columns = curves.map((curve) => {
    /** @type {(number | null | undefined)[]} */
    const column = new Array(xs.length).fill(undefined);
    curve.x.forEach((x, i) => {
      column[/** @type {number} */ (place.get(x))] = curve.y[i];
    });
    return column;
  });
  return [xs, ...columns];
}

/**
 * @param {string} title
 * @param {Curve[]} curves
 * @param {string} xName
 * @param {(value: number | null | undefined) => string} format
 */
function summary(title, curves, xName, format) {
  const parts = curves.slice(0, 6).map((curve) => {
    const values = curve.y.filter((value) => value !== null);
    if (values.length === 0) return `${curve.label}: no values`;
    const low = format(values.reduce((a, b) => Math.min(/** @type {number} */ (a), /** @type {number} */ (b))));
    const high = format(values.reduce((a, b) => Math.max(/** @type {number} */ (a), /** @type {number} */ (b))));
    const from = `${xName} ${number(curve.x[0])} to ${number(curve.x[curve.x.length - 1])}`;
    return `${curve.label}: ${from}, lowest ${low}, highest ${high}, newest ${format(last(curve.y))}`;
  });
  return `Chart of ${title}. ${parts.join("; ")}`;
}

/** @param {(number | null | undefined)[]} values */
function last(values) {
  for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

/**
 * @param {HTMLElement} parent
 * @param {Curve[]} curves
 * @param {number} height
 * @param {string} xName
 * @param {string | undefined} sync
 * @param {boolean | undefined} zero
 * @param {(value: number | null | undefined) => string} format
 * @param {(at: number | null) => void} setAt
 * @returns {uPlot.Options}
 */
function options(parent, curves, height, xName, sync, zero, format, setAt) {
  const style = getComputedStyle(parent);
  const color = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  const font = `11px ${style.fontFamily}`;
  const axis = {
    stroke: color("--muted"),
    font,
    grid: { stroke: color("--line"), width: 1 },
    ticks: { show: false },
    gap: 4,
  };
  return {
    width: Math.max(120, parent.clientWidth),
    height,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false }, points: { size: 6 }, ...(sync ? { sync: { key: sync, setSeries: false } } : {}) },
    scales: {
      x: { time: false },
      y: { range: (_plot, low, high) => spread(low, high, zero ?? false) },
    },
    axes: [
      { ...axis, size: 22, space: 60, values: (_plot, splits) => splits.map((value) => (Number.isInteger(value) || xName !== "step" ? number(value) : "")) },
      { ...axis, size: labelWidth, space: 30, values: (_plot, splits) => splits.map((value) => format(value)) },
    ],
    series: [
      {},
      ...curves.map((curve, i) => ({
        label: curve.label,
        stroke: color(`--c${(curve.color ?? i) % COLORS}`),
        width: 1.5,
        dash: DASHES[(curve.dash ?? i) % DASHES.length],
        spanGaps: true,
        points: { show: curve.x.length < 2, size: 5 },
      })),
    ],
    hooks: { setCursor: [(plot) => setAt(plot.cursor.idx ?? null)] },
  };
}

/**
 * Width of an axis with the longest of its labels, such as 2 min 30 s.
 * @param {uPlot} _plot
 * @param {string[] | null} labels
 */
function labelWidth(_plot, labels) {
  return Math.max(52, ...(labels ?? []).map((label) => 12 + 6.5 * label.length));
}

/**
 * @param {number | null} low
 * @param {number | null} high
 * @param {boolean} zero
 * @returns {[number, number]}
 */
function spread(low, high, zero) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  const bottom = zero ? Math.min(0, low) : low;
  if (bottom === high) return [bottom - (Math.abs(bottom) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const margin = 0.06 * (high - bottom);
  return [zero && bottom === 0 ? 0 : bottom - margin, high + margin];
}
