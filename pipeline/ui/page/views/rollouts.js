// Rollouts: filters, a list of any length, and the one that is open beside it.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, number, signed, versionText, whole } from "../lib/format.js";
import { link, replaceQuery } from "../lib/route.js";
import { PAGE_ROWS, Rows } from "../lib/rows.js";
import { Fate } from "../parts/basics.js";
import { FILTERS, Filters } from "../parts/filters.js";
import { LongList, useVersion } from "../parts/long_list.js";
import { OneRollout } from "./rollout.js";

/** @typedef {import("../contract").Row} Row */

const COLUMNS = [
  { name: "place", text: "Place" },
  { name: "environment", text: "Environment" },
  { name: "version", text: "Version", number: true },
  { name: "reward", text: "Reward", number: true },
  { name: "advantage", text: "Advantage", number: true },
  { name: "length", text: "Tokens", number: true },
  { name: "fate", text: "Fate" },
  { name: "preview", text: "Begins" },
];

/** @param {import("../app").ViewProps} props */
export function RolloutsView({ run, live, query }) {
  const filter = JSON.stringify(Object.fromEntries(FILTERS.map((name) => [name, query[name] ?? ""])));
  const [version, changed] = useVersion();
  const [reload, setReload] = useState(0);
  const [cursor, setCursor] = useState(-1);
  const [loadedAt, setLoadedAt] = useState(live.tick);
  const facets = useAnswer(address(run, "facets"), live.tick);
  const rows = useMemo(
    () => /** @type {Rows<Row>} */ (new Rows((after, skip) => address(run, "rollouts", { ...JSON.parse(filter), after, skip: skip || null, limit: PAGE_ROWS }), changed)),
    [run, filter, reload],
  );
  const open = query.open ?? "";
  useEffect(() => {
    setCursor(-1);
    setLoadedAt(live.tick);
    return () => rows.close();
  }, [rows]);
  useEffect(() => {
    if (rows.error && live.connection === "open") rows.again();
  }, [live.tick]);
  useEffect(() => {
    if (open && cursor < 0) {
      const index = rows.find((row) => row.place === open);
      if (index >= 0) setCursor(index);
    }
  }, [version, open]);

  const show = (/** @type {Row} */ row, /** @type {boolean} */ replace = false) => {
    if (replace) replaceQuery({ open: row.place });
    else if (row.place !== open) location.hash = link(run, "rollouts", { ...query, open: row.place });
  };
  const close = () => {
    replaceQuery({ open: "" });
    /** @type {HTMLElement | null} */ (document.querySelector(".long-list"))?.focus();
  };
  useKeys({ rows, cursor, setCursor, open, show, close });

  const fresh = live.tick > loadedAt && (query.order ?? "newest") === "newest";
  return html`
    <${Filters} query=${query} facets=${facets.data} />
    <div class=${open ? "split opened" : "split"}>
      <section class="split-list" aria-label="List of rollouts">
        <p class="list-state">
          <span role="status" aria-live="polite">${matching(rows)}</span>
          ${fresh ? html`<button type="button" class="link" onClick=${() => setReload((n) => n + 1)}>Load newer</button>` : null}
          <span class="keys muted"><kbd>j</kbd> <kbd>k</kbd> move, <kbd>Enter</kbd> opens, <kbd>Esc</kbd> closes</span>
        </p>
        <${LongList} rows=${rows} version=${version} label="Rollouts" columns=${COLUMNS} cells=${cellsOf} keyOf=${(/** @type {Row} */ row) => row.place}
          cursor=${cursor} opened=${open} onCursor=${setCursor} onOpen=${show} empty="No rollout matches these filters." />
      </section>
      ${open ? html`<${OneRollout} key=${open} run=${run} place=${open} tick=${live.tick} onClose=${close} />` : null}
    </div>`;
}

/** @param {Rows<Row>} rows */
function matching(rows) {
  if (rows.matching === null) return rows.error ? "" : "Reading…";
  const text = `${whole(rows.matching)} ${rows.matching === 1 ? "rollout matches" : "rollouts match"}`;
  return rows.exact ? text : `more than ${text}`;
}

/**
 * @param {Row} row
 * @returns {import("../vendor/preact-htm").Child[]}
 */
function cellsOf(row) {
  const versions = row.lowest_version !== row.highest_version ? `v${row.lowest_version}–${row.highest_version}` : versionText(row.version);
  return [
    row.place,
    html`<span>${row.environment}</span>${row.example ? html`<span class="muted"> / ${row.example}</span>` : null}`,
    versions,
    number(row.reward, 3),
    signed(row.advantage),
    html`${count(row.length)}${row.truncated ? html`<abbr title="truncated"> ✂</abbr>` : null}`,
    html`<${Fate} fate=${row.fate} reason=${row.reason} />`,
    row.preview,
  ];
}

/**
 * Keys that work wherever the focus is, except in fields.
 * @param {{ rows: Rows<Row>, cursor: number, setCursor: (index: number) => void, open: string,
 *   show: (row: Row, replace?: boolean) => void, close: () => void }} state
 */
function useKeys(state) {
  const latest = useRef(state);
  latest.current = state;
  useEffect(() => {
    const pressed = (/** @type {KeyboardEvent} */ event) => {
      const { rows, cursor, setCursor, open, show, close } = latest.current;
      const target = /** @type {HTMLElement} */ (event.target);
      if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, select, textarea, dialog, .strip")) return;
      const inList = target.closest(".long-list") !== null;
      if (event.key === "Escape" && open) {
        close();
        return;
      }
      const page = 15;
      const moves = /** @type {Record<string, number>} */ ({ j: 1, k: -1, ...(inList ? { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page } : {}) });
      if (event.key in moves && rows.length > 0) {
        event.preventDefault();
        const next = Math.max(0, Math.min(rows.length - 1, cursor + moves[event.key]));
        setCursor(next);
        const row = rows.at(next);
        if (open && row) show(row, true);
        return;
      }
      if (event.key === "Enter" && !target.closest("a, button, summary")) {
        const row = rows.at(cursor);
        if (row) show(row);
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}
