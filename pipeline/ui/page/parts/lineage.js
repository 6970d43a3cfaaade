// Trees of lineage: where a rollout came from and what became of it.

import { html } from "../vendor/preact-htm.js";
import { plain, words } from "../lib/format.js";
import { link } from "../lib/route.js";

/** @typedef {import("../contract").TreeNode} TreeNode */

const NOT_FACTS = ["kind", "name", "children"];

/** @param {{ nodes: TreeNode[], run: string }} props */
export function Lineage({ nodes, run }) {
  return html`<ul class="tree">${nodes.map((node) => html`<${Node} node=${node} run=${run} />`)}</ul>`;
}

/** @param {{ node: TreeNode, run: string }} props */
function Node({ node, run }) {
  const facts = Object.entries(node).filter(([name]) => !NOT_FACTS.includes(name));
  const href = hrefOf(node, run);
  const name = String(node.name ?? "");
  return html`<li>
    <span class="tree-kind">${words(node.kind)}</span> ${href ? html`<a href=${href}>${name}</a>` : html`<strong>${name}</strong>`}
    ${facts.length
      ? html`<dl class="tree-facts">${facts.map(([key, value]) => html`<div><dt>${words(key)}</dt><dd>${textOf(value)}</dd></div>`)}</dl>`
      : null}
    ${node.children?.length ? html`<${Lineage} nodes=${node.children} run=${run} />` : null}
  </li>`;
}

/**
 * @param {TreeNode} node
 * @param {string} run
 */
function hrefOf(node, run) {
  const name = String(node.name ?? "");
  if (node.kind === "batch") return link(run, "rollouts", { batch: name });
  if (node.kind === "rollout" && node.offset) return link(run, "rollouts", { open: String(node.offset) });
  if (node.kind === "sampled_by_policy") return link(run, "rollouts", { version: name });
  return null;
}

/** @param {unknown} value */
function textOf(value) {
  if (Array.isArray(value)) return value.map(plain).join(" ");
  if (value !== null && typeof value === "object") return Object.entries(value).map(([key, each]) => `${words(key)} ${plain(each)}`).join(", ");
  return plain(value);
}
