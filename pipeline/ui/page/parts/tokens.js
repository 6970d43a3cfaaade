// The tokens of a rollout in a row, coloured by one of their values, with every value as a number for the chosen token.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { number, percent, signed, versionText } from "../lib/format.js";
import { Failure } from "./basics.js";
import { legendOf, toneOf } from "./token_tones.js";

/** @typedef {import("../contract").Tokens} Tokens */

const SHOWN = 1000;
const MODES = /** @type {[import("./token_tones").Mode, string][]} */ ([
  ["logprobs", "log-probability"],
  ["ratios", "ratio"],
  ["advantages", "advantage"],
  ["mask", "mask"],
  ["versions", "version"],
  ["token_rewards", "reward"],
]);

/** @param {{ tokens: Tokens, run: string, place: string, start: number | null }} props */
export function TokenStrip({ tokens: firstTokens, run, place, start }) {
  const [from, setFrom] = useState(firstTokens.from);
  const inFirst = from >= firstTokens.from && from < firstTokens.from + Math.max(1, firstTokens.ids.length);
  const path = `rollouts/${place.replace(":", "/")}`;
  const further = useAnswer(inFirst ? null : address(run, path, { tokens_from: from }));
  const tokens = inFirst ? firstTokens : /** @type {Tokens | null} */ (further.data?.tokens ?? null);
  useEffect(() => {
    if (start !== null) setFrom(Math.floor(start / SHOWN) * SHOWN);
  }, [start]);
  const total = firstTokens.total;
  return html`
    ${total > SHOWN
      ? html`<div class="pager">
          <button type="button" disabled=${from === 0} onClick=${() => setFrom(Math.max(0, from - SHOWN))}>Earlier</button>
          <span>tokens ${number(from)} to ${number(Math.min(from + SHOWN, total) - 1)} of ${number(total)}</span>
          <button type="button" disabled=${from + SHOWN >= total} onClick=${() => setFrom(from + SHOWN)}>Later</button>
        </div>`
      : null}
    ${further.error ? html`<${Failure} error=${further.error} again=${further.again} />` : null}
    ${tokens ? html`<${Strip} tokens=${tokens} from=${from} start=${start} key=${place} />` : null}`;
}

/** @param {{ tokens: Tokens, from: number, start: number | null }} props */
function Strip({ tokens, from, start }) {
  const known = MODES.filter(([mode]) => mode === "mask" || tokens[mode].some((value) => value !== null));
  const [wanted, setMode] = useState(known[0][0]);
  const mode = known.some(([each]) => each === wanted) ? wanted : known[0][0];
  const [numbers, setNumbers] = useState(false);
  const [active, setActive] = useState(from);
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const begin = from - tokens.from;
  const end = Math.min(begin + SHOWN, tokens.ids.length);
  useEffect(() => {
    const named = start !== null && start >= from && start < from + SHOWN;
    setActive(named ? start : from);
    // A prompt may be longer than the window.
    if (named) document.getElementById(`token-${start}`)?.scrollIntoView({ block: "center" });
  }, [from, start]);

  const scale = useMemo(() => tokens.advantages.reduce((most, value) => Math.max(/** @type {number} */ (most), Math.abs(value ?? 0)), 0) || 1, [tokens]);
  const spans = useMemo(() => {
    const made = [];
    for (let i = begin; i < end; i += 1) {
      const tone = toneOf(tokens, i, mode, /** @type {number} */ (scale));
      made.push(
        html`<span id=${`token-${i + tokens.from}`} data-i=${i + tokens.from} role="option" aria-selected="false" class=${`token ${tone}`}>${textOf(tokens, i)}${
          numbers ? html`<span class="token-number">${short(tokens, i, mode)}</span>` : null
        }</span>`,
      );
    }
    return made;
  }, [tokens, mode, begin, end, numbers]);
  useEffect(() => {
    const chosen = box.current?.querySelector(`[data-i="${active}"]`);
    box.current?.querySelector(".active")?.setAttribute("aria-selected", "false");
    box.current?.querySelector(".active")?.classList.remove("active");
    chosen?.classList.add("active");
    chosen?.setAttribute("aria-selected", "true");
  }, [active, spans]);

  const pointed = (/** @type {Event} */ event) => {
    const token = /** @type {HTMLElement} */ (event.target).closest("[data-i]");
    if (token instanceof HTMLElement) setActive(Number(token.dataset.i));
  };
  const keyed = (/** @type {KeyboardEvent} */ event) => {
    const moves = /** @type {Record<string, number>} */ ({ ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -SHOWN, End: SHOWN });
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.max(from, Math.min(tokens.from + end - 1, active + moves[event.key]));
    setActive(next);
    document.getElementById(`token-${next}`)?.scrollIntoView({ block: "nearest" });
  };
  const i = active - tokens.from;
  return html`
    <div class="token-tools">
      <fieldset class="choice"><legend class="hidden">Colour by</legend>
        ${known.map(
          ([each, text]) => html`<label class=${each === mode ? "on" : ""}><input type="radio" name="tone" checked=${each === mode} onChange=${() => setMode(each)} />${text}</label>`,
        )}
      </fieldset>
      <label class="check"><input type="checkbox" checked=${numbers} onChange=${() => setNumbers(!numbers)} /> numbers</label>
    </div>
    <ul class="token-legend">
      ${legendOf(tokens, mode, /** @type {number} */ (scale)).map(([tone, text]) => html`<li><span class=${`token ${tone}`} aria-hidden="true">ab</span> ${text}</li>`)}
    </ul>
    <p class="readout" role="status" aria-live="polite">${i >= 0 && i < tokens.ids.length ? readout(tokens, i) : ""}</p>
    <div ref=${box} class="strip" role="listbox" tabindex="0" aria-label="Tokens; arrow keys move, the line above has the values"
      aria-activedescendant=${`token-${active}`} onMouseOver=${pointed} onClick=${pointed} onKeyDown=${keyed}>${spans}</div>`;
}

/**
 * @param {Tokens} tokens
 * @param {number} i
 */
function textOf(tokens, i) {
  const text = tokens.texts?.[i];
  if (text === undefined || text === null) return String(tokens.ids[i]);
  return text === "" ? "∅" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
}

/**
 * @param {Tokens} tokens
 * @param {number} i
 */
function readout(tokens, i) {
  const text = tokens.texts ? ` ${JSON.stringify(tokens.texts[i] ?? "")}` : "";
  const parts = [`token ${i + tokens.from}${text}, id ${tokens.ids[i]}`];
  if (!tokens.mask[i]) return `${parts[0]}: context, not trained on`;
  const logprob = tokens.logprobs[i];
  if (logprob !== null && logprob !== undefined) parts.push(`log-probability ${signed(logprob)} (${percent(Math.exp(logprob))})`);
  for (const [mode, name] of /** @type {["ratios" | "token_rewards", string][]} */ ([["ratios", "ratio"], ["token_rewards", "reward"]])) {
    const value = tokens[mode][i];
    if (value !== null && value !== undefined) parts.push(`${name} ${number(value, 4)}`);
  }
  const advantage = tokens.advantages[i];
  if (advantage !== null && advantage !== undefined) parts.push(`advantage ${signed(advantage)}`);
  const version = tokens.versions[i];
  if (version !== null && version !== undefined) parts.push(`by ${versionText(version)}`);
  return parts.join(" · ");
}

/**
 * @param {Tokens} tokens
 * @param {number} i
 * @param {import("./token_tones").Mode} mode
 */
function short(tokens, i, mode) {
  if (mode === "mask") return tokens.mask[i] ? "1" : "0";
  if (!tokens.mask[i]) return "·";
  const value = tokens[mode][i];
  return value === null || value === undefined ? "–" : mode === "versions" ? String(value) : mode === "ratios" ? value.toFixed(2) : signed(Number(value.toPrecision(2)));
}
