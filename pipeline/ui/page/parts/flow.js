// The flow of a run as a picture: who runs, what moves between them, how fast, how much waits, at which version.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { count, duration, rate, versionText } from "../lib/format.js";
import { link } from "../lib/route.js";

/** @typedef {import("../contract").Top} Top */
/** @typedef {{ x: number, y: number, w: number, h: number }} Box */
/** @typedef {{ name: string, title: string, lines: string[], href: string, box: Box }} Node */
/** @typedef {{ path: string, moving: boolean, title: string, lines: string[], x: number, y: number, anchor: string }} Edge */

/** @param {{ top: Top, live: boolean, run: string }} props */
export function Flow({ top, live, run }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [width, setWidth] = useState(900);
  useEffect(() => {
    if (!box.current) return undefined;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const texts = wording(top);
  const { nodes, edges, height } = width >= 760 ? wide(width, texts, run) : tall(width, texts, run);
  return html`<div ref=${box} class="flow">
    <svg viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="group" aria-label="Flow of the run">
      <defs>
        <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
          <path d="M0 0.5 L7.5 4 L0 7.5 z" class="tip" />
        </marker>
      </defs>
      ${edges.map(
        (edge) => html`<g class=${live && edge.moving ? "edge moving" : "edge"} key=${edge.title}>
          <path d=${edge.path} class="edge-line" marker-end="url(#tip)" />
          <text x=${edge.x} y=${edge.y} text-anchor=${edge.anchor}>
            <tspan class="edge-title">${edge.title}</tspan>
            ${edge.lines.map((line, i) => html`<tspan x=${edge.x} dy=${i === 0 ? 32 : 16} class="edge-note">${line}</tspan>`)}
          </text>
        </g>`,
      )}
      ${nodes.map(
        (node) => html`<a href=${node.href} class="node" key=${node.name} aria-label=${`${node.title}: ${node.lines.join(", ")}`}>
          <rect x=${node.box.x} y=${node.box.y} width=${node.box.w} height=${node.box.h} rx="6" />
          <text x=${node.box.x + node.box.w / 2} y=${node.box.y + 22} text-anchor="middle">
            <tspan class="node-title">${node.title}</tspan>
            ${node.lines.map((line) => html`<tspan x=${node.box.x + node.box.w / 2} dy="17" class="node-note">${line}</tspan>`)}
          </text>
        </a>`,
      )}
    </svg>
  </div>`;
}

/** @param {Top} top */
function wording(top) {
  const of = (/** @type {string[]} */ roles) => top.components.filter((each) => roles.includes(each.role));
  const number = (/** @type {import("../contract").Component[]} */ parts) => parts.reduce((sum, each) => sum + each.components, 0);
  const total = (/** @type {import("../contract").Component[]} */ parts, /** @type {string} */ name) =>
    parts.reduce((sum, each) => sum + (each.values[name] ?? 0), 0);
  const workers = of(["env"]);
  const gateways = of(["gateway"]);
  const servers = of(["infer", "serve-weights"]);
  const serving = servers.map((each) => each.values.policy_version).filter((version) => version !== undefined);
  const dropped = Object.values(top.dropped).reduce((sum, n) => sum + n, 0);
  return {
    workers: {
      title: gateways.length ? "Workers, gateways" : "Workers",
      lines: [
        workers.length || gateways.length ? `${number(workers) + number(gateways)} seen` : "none seen",
        `${rate(total(workers, "tokens_per_s"))} tokens/s`,
      ],
    },
    grouping: {
      title: "Grouping",
      lines: [`${count(top.in_flight)} in flight`, `${count(dropped)} dropped`],
    },
    learner: { title: "Learner", lines: [`step ${count(top.step)}`, `${rate(top.steps_per_s)} steps/s`] },
    servers: {
      title: "Inference",
      lines: [servers.length ? `${number(servers)} seen` : "none seen", serving.length ? `serves ${versionText(Math.min(...serving))}` : "no version"],
    },
    rollouts: { title: `${rate(top.rollouts_per_s)} rollouts/s`, lines: [`${count(top.unread)} unread`], moving: top.rollouts_per_s > 0 },
    batches: { title: `${rate(top.batches_per_s)} batches/s`, lines: [`${count(top.waiting)} waiting`], moving: top.batches_per_s > 0 },
    weights: {
      title: `weights ${versionText(top.policy_version)}`,
      lines: [top.policy_version >= 0 ? `${duration(top.policy_age_s)} old` : "not yet"],
      moving: top.policies_per_s > 0,
    },
    samples: { title: "samples", lines: [`newest by ${versionText(top.sampled_version)}`], moving: top.rollouts_per_s > 0 },
  };
}

/**
 * A rectangle: workers, grouping, learner above; inference below.
 * @param {number} width
 * @param {ReturnType<typeof wording>} texts
 * @param {string} run
 */
function wide(width, texts, run) {
  const w = 160;
  const h = 70;
  const y = 8;
  const low = 150;
  const middle = (width - w) / 2;
  const right = width - w - 1;
  const nodes = nodesOf(texts, run, {
    workers: { x: 1, y, w, h },
    grouping: { x: middle, y, w, h },
    learner: { x: right, y, w, h },
    servers: { x: middle, y: low, w, h },
  });
  const line = y + h / 2;
  const lowLine = low + h / 2;
  const first = (1 + w + middle) / 2;
  const second = (middle + w + right) / 2;
  /** @type {Edge[]} */
  const edges = [
    edge(texts.rollouts, `M${1 + w} ${line} H${middle - 2}`, first, line - 10),
    edge(texts.batches, `M${middle + w} ${line} H${right - 2}`, second, line - 10),
    edge(texts.weights, `M${right + w / 2} ${y + h} V${lowLine} H${middle + w + 2}`, second, lowLine - 10),
    edge(texts.samples, `M${middle} ${lowLine} H${1 + w / 2} V${y + h + 2}`, first, lowLine - 10),
  ];
  return { nodes, edges, height: low + h + 8 };
}

/**
 * A column, for narrow windows.
 * @param {number} width
 * @param {ReturnType<typeof wording>} texts
 * @param {string} run
 */
function tall(width, texts, run) {
  const w = 160;
  const h = 70;
  const gap = 58;
  const x = Math.max(24, (width - w) / 2 - 40);
  const at = (/** @type {number} */ i) => 4 + i * (h + gap);
  const nodes = nodesOf(texts, run, {
    workers: { x, y: at(0), w, h },
    grouping: { x, y: at(1), w, h },
    learner: { x, y: at(2), w, h },
    servers: { x, y: at(3), w, h },
  });
  const center = x + w / 2;
  const down = (/** @type {number} */ i) => `M${center} ${at(i) + h} V${at(i + 1) - 2}`;
  const beside = (/** @type {number} */ i) => at(i) + h + 22;
  const end = at(3) + h;
  /** @type {Edge[]} */
  const edges = [
    { ...edge(texts.rollouts, down(0), center + 12, beside(0)), anchor: "start" },
    { ...edge(texts.batches, down(1), center + 12, beside(1)), anchor: "start" },
    { ...edge(texts.weights, down(2), center + 12, beside(2)), anchor: "start" },
    { ...edge(texts.samples, `M${center} ${end} V${end + 16} H8 V${at(0) + h / 2} H${x - 2}`, center + 12, end + 32), anchor: "start" },
  ].map((each) => ({ ...each, lines: [], title: `${each.title}, ${each.lines.join(", ")}` }));
  return { nodes, edges, height: end + 44 };
}

/**
 * @param {ReturnType<typeof wording>} texts
 * @param {string} run
 * @param {Record<"workers" | "grouping" | "learner" | "servers", Box>} boxes
 * @returns {Node[]}
 */
function nodesOf(texts, run, boxes) {
  const hrefs = { workers: link(run, "rollouts"), grouping: link(run, "groups"), learner: link(run, "run", { at: "curves" }), servers: link(run, "weights") };
  const names = /** @type {("workers" | "grouping" | "learner" | "servers")[]} */ (["workers", "grouping", "learner", "servers"]);
  return names.map((name) => ({ name, ...texts[name], href: hrefs[name], box: boxes[name] }));
}

/**
 * @param {{ title: string, lines: string[], moving: boolean }} text
 * @param {string} path
 * @param {number} x
 * @param {number} y
 * @returns {Edge}
 */
function edge(text, path, x, y) {
  return { ...text, path, x, y, anchor: "middle" };
}
