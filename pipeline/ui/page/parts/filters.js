// The filters of rollouts. They stand in the address, so that a link restores them.

import { html, useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { count, words } from "../lib/format.js";
import { replaceQuery } from "../lib/route.js";

const CHIPS = ["example", "group", "batch", "step", "uid", "version"];
const RANGES = ["version_min", "version_max", "reward_min", "reward_max"];

/** Names in the query of the address that are filters. */
export const FILTERS = ["environment", "worker", "fate", "reason", "text", "order", ...RANGES, ...CHIPS];

/** @param {{ query: Record<string, string>, facets: import("../contract").Facets | null }} props */
export function Filters({ query, facets }) {
  const chips = CHIPS.filter((name) => query[name]);
  const ranges = RANGES.some((name) => query[name]);
  const set = FILTERS.some((name) => name !== "order" && query[name]);
  const change = (/** @type {string} */ name) => (/** @type {Event} */ event) => {
    const { value } = /** @type {HTMLSelectElement} */ (event.target);
    replaceQuery({ [name]: value, ...(name === "fate" && !["dropped", "skipped"].includes(value) ? { reason: "" } : {}) });
  };
  const clear = () => replaceQuery(Object.fromEntries(FILTERS.filter((name) => name !== "order").map((name) => [name, ""])));
  return html`<form class="filters panel" role="search" aria-label="Filters of rollouts" onSubmit=${(/** @type {Event} */ event) => event.preventDefault()}>
    <${Typed} label="Text" name="text" value=${query.text ?? ""} type="search" />
    <${Choice} label="Environment" value=${query.environment ?? ""} names=${facets?.environments ?? []} onChange=${change("environment")} />
    <${Choice} label="Fate" value=${query.fate ?? ""} names=${Object.keys(facets?.fates ?? {})} counts=${facets?.fates} onChange=${change("fate")} />
    <${Choice} label="Reason" value=${query.reason ?? ""} names=${Object.keys(facets?.reasons ?? {})} counts=${facets?.reasons} onChange=${change("reason")} />
    <${Choice} label="Worker" value=${query.worker ?? ""} names=${facets?.workers ?? []} onChange=${change("worker")} />
    <label>Order <select value=${query.order ?? "newest"} onChange=${change("order")}>
      ${["newest", "oldest", "reward", "length", "advantage"].map((name) => html`<option value=${name}>${name}</option>`)}
    </select></label>
    <details class="ranges-of" open=${ranges}>
      <summary>Ranges</summary>
      <div class="filter-row">
        <${Typed} label="Version from" name="version_min" value=${query.version_min ?? ""} type="number" />
        <${Typed} label="to" name="version_max" value=${query.version_max ?? ""} type="number" />
        <${Typed} label="Reward from" name="reward_min" value=${query.reward_min ?? ""} type="number" />
        <${Typed} label="to" name="reward_max" value=${query.reward_max ?? ""} type="number" />
      </div>
    </details>
    ${chips.map(
      (name) => html`<button type="button" class="chip" key=${name} onClick=${() => replaceQuery({ [name]: "" })} aria-label=${`${name} ${query[name]}: remove this filter`}>
        <span>${name} <strong>${query[name]}</strong></span> <span aria-hidden="true">×</span>
      </button>`,
    )}
    ${set ? html`<button type="button" class="link" onClick=${clear}>Clear all</button>` : null}
  </form>`;
}

/** @param {{ label: string, value: string, names: string[], counts?: Record<string, number>, onChange: (event: Event) => void }} props */
function Choice({ label, value, names, counts, onChange }) {
  const all = value && !names.includes(value) ? [value, ...names] : names;
  return html`<label>${label} <select value=${value} onChange=${onChange}>
    <option value="">all</option>
    ${all.map((name) => html`<option value=${name}>${counts ? words(name).replaceAll(",", ", ") : name}${counts?.[name] !== undefined ? ` (${count(counts[name])})` : ""}</option>`)}
  </select></label>`;
}

/** @param {{ label: string, name: string, value: string, type: string }} props */
function Typed({ label, name, value, type }) {
  const [text, setText] = useState(value);
  const timer = useRef(/** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined));
  const sent = useRef(value);
  useEffect(() => {
    if (value !== sent.current) {
      sent.current = value;
      setText(value);
    }
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = (/** @type {Event} */ event) => {
    const next = /** @type {HTMLInputElement} */ (event.target).value;
    setText(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      sent.current = next;
      replaceQuery({ [name]: next });
    }, 300);
  };
  return html`<label class=${`typed-${type}`}>${label} <input type=${type} step="any" value=${text} onInput=${typed} autocomplete="off" spellcheck="false" /></label>`;
}
