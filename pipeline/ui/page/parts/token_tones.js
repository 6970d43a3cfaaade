// The colour classes of tokens and what they mean. Signs have a mark of their own beside the colour: dashes below zero.

import { number, signed, versionText } from "../lib/format.js";

/** @typedef {import("../contract").Tokens} Tokens */
/** @typedef {"logprobs" | "ratios" | "advantages" | "mask" | "versions" | "token_rewards"} Mode */

const SURPRISE = [0.05, 0.3, 0.7, 1.5, 3, 6];
const RATIO = [0.02, 0.1, 0.3];
const SHARE = [0.05, 0.35, 0.7];

/**
 * The class of a token.
 * @param {Tokens} tokens
 * @param {number} i
 * @param {Mode} mode
 * @param {number} scale the largest advantage, without its sign
 */
export function toneOf(tokens, i, mode, scale) {
  if (!tokens.mask[i]) return "context";
  if (mode === "mask") return "v0";
  const value = tokens[mode][i];
  if (value === null || value === undefined) return "plain";
  if (mode === "logprobs") return `q${bin(-value, SURPRISE)}`;
  if (mode === "ratios") return signedTone(Math.log(Math.max(value, 1e-6)), RATIO);
  if (mode === "versions") return `v${((value % 6) + 6) % 6}`;
  return signedTone(value / (mode === "advantages" ? scale : 1), SHARE);
}

/**
 * What the classes mean, as [class, text].
 * @param {Tokens} tokens
 * @param {Mode} mode
 * @param {number} scale
 * @returns {[string, string][]}
 */
export function legendOf(tokens, mode, scale) {
  const context = /** @type {[string, string]} */ (["context", "context, not trained on"]);
  if (mode === "mask") return [["v0", "sampled, trained on"], context];
  if (mode === "logprobs") {
    const edges = [0, ...SURPRISE];
    return [
      ...edges.map((edge, i) => /** @type {[string, string]} */ ([`q${i}`, i + 1 < edges.length ? `${signed(-edge)} to ${signed(-edges[i + 1])}` : `below ${signed(-edge)}`])),
      context,
    ];
  }
  if (mode === "versions") {
    const versions = [...new Set(tokens.versions.filter((value) => value !== null))].sort((a, b) => Number(a) - Number(b));
    const some = versions.slice(0, 8).map((value) => /** @type {[string, string]} */ ([`v${((Number(value) % 6) + 6) % 6}`, versionText(value)]));
    return versions.length > 8 ? [...some, ["plain", `and ${versions.length - 8} more; colours repeat`], context] : [...some, context];
  }
  if (mode === "ratios") {
    const at = RATIO.map((edge) => [number(Math.exp(-edge), 2), number(Math.exp(edge), 2)]);
    return [
      ["n3", `below ${at[2][0]}`],
      ["n2", `${at[2][0]} to ${at[1][0]}`],
      ["n1", `${at[1][0]} to ${at[0][0]}`],
      ["zero", "about 1"],
      ["p1", `${at[0][1]} to ${at[1][1]}`],
      ["p2", `${at[1][1]} to ${at[2][1]}`],
      ["p3", `above ${at[2][1]}`],
      context,
    ];
  }
  const most = mode === "advantages" ? scale : 1;
  return [
    ["n3", `below ${signed(-SHARE[2] * most)}`],
    ["n2", `to ${signed(-SHARE[1] * most)}`],
    ["n1", "a little below 0"],
    ["zero", "about 0"],
    ["p1", "a little above 0"],
    ["p2", `from ${signed(SHARE[1] * most)}`],
    ["p3", `above ${signed(SHARE[2] * most)}`],
    context,
  ];
}

/**
 * @param {number} value
 * @param {number[]} edges
 */
function bin(value, edges) {
  const at = edges.findIndex((edge) => value < edge);
  return at < 0 ? edges.length : at;
}

/**
 * @param {number} value
 * @param {number[]} edges
 */
function signedTone(value, edges) {
  const strength = bin(Math.abs(value), edges);
  return strength === 0 ? "zero" : `${value < 0 ? "n" : "p"}${strength}`;
}
