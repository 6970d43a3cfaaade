// A list of any length of which only the rows in view are in the document, with a cursor that keys move.

import { html, useEffect, useLayoutEffect, useReducer, useRef, useState } from "../vendor/preact-htm.js";
import { Empty, Failure, Loading } from "./basics.js";

const OVERSCAN = 8;
const NARROW = 640;
const TALLEST = 12_000_000;
// Browsers limit the height of an element (Firefox to 17.9 million pixels): a longer list moves by more than one pixel
// for each pixel of the scroll bar.

/**
 * @template T
 * @typedef {{ rows: import("../lib/rows").Rows<T>, label: string, columns: { name: string, text: string, number?: boolean }[],
 *   cells: (row: T) => import("../vendor/preact-htm").Child[], keyOf: (row: T) => string, cursor: number,
 *   opened: string, onCursor: (index: number) => void, onOpen: (row: T) => void, empty: string, version: number }} Props
 */

/** @param {Props<any>} props */
export function LongList({ rows, label, columns, cells, keyOf, cursor, opened, onCursor, onOpen, empty, version }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [size, setSize] = useState({ width: 900, height: 400 });
  const [top, setTop] = useState(0);
  const narrow = size.width < NARROW;
  const height = narrow ? 60 : 32;

  useEffect(() => {
    if (!box.current) return undefined;
    const observer = new ResizeObserver(([entry]) =>
      setSize({ width: Math.round(entry.contentRect.width), height: Math.round(entry.contentRect.height) }),
    );
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);

  const pending = !rows.complete && !rows.error;
  const whole = (rows.length + (pending ? 1 : 0)) * height;
  const tall = Math.min(whole, TALLEST);
  const view = size.height - (narrow ? 0 : height);
  const ratio = whole > tall ? (whole - view) / (tall - view) : 1;
  const shift = top * (ratio - 1);
  const first = Math.max(0, Math.floor((top + shift) / height) - OVERSCAN);
  const last = Math.min(rows.length, Math.ceil((top + shift + size.height) / height) + OVERSCAN);
  const near = last >= rows.length - OVERSCAN;
  useEffect(() => rows.need(first, near ? rows.length + 1 : last), [rows, first, last, near, version]);
  useLayoutEffect(() => {
    if (box.current) box.current.scrollTop = 0;
    setTop(0);
  }, [rows]);
  useLayoutEffect(() => {
    const parent = box.current;
    if (!parent || cursor < 0) return;
    const seen = parent.scrollTop * ratio;
    if (cursor * height < seen) parent.scrollTop = (cursor * height) / ratio;
    else if ((cursor + 1) * height > seen + view) parent.scrollTop = ((cursor + 1) * height - view) / ratio;
  }, [cursor, height]);

  const visible = [];
  for (let i = first; i < last; i += 1) visible.push(i);
  return html`<div
    ref=${box}
    class=${`long-list ${narrow ? "narrow" : "wide"}`}
    role="grid"
    tabindex="0"
    aria-label=${label}
    aria-rowcount=${rows.complete ? rows.length + 1 : -1}
    aria-activedescendant=${cursor >= first && cursor < last ? `row-${cursor}` : undefined}
    onScroll=${(/** @type {Event} */ event) => setTop(/** @type {HTMLElement} */ (event.target).scrollTop)}
  >
    <div class="list-row list-head" role="row" aria-rowindex="1">
      ${columns.map((column) => html`<span role="columnheader" class=${`cell-${column.name}${column.number ? " n" : ""}`}>${column.text}</span>`)}
    </div>
    <div class="list-body" role="presentation" style=${{ height: `${tall}px` }}>
      ${visible.map((i) => {
        const row = rows.at(i);
        const chosen = i === cursor;
        const open = row !== null && keyOf(row) === opened;
        return html`<div
          key=${i}
          id=${`row-${i}`}
          role="row"
          aria-rowindex=${i + 2}
          aria-selected=${chosen}
          class=${`list-row${chosen ? " chosen" : ""}${open ? " open" : ""}`}
          style=${{ transform: `translateY(${i * height - shift}px)`, height: `${height}px` }}
          onClick=${() => {
            onCursor(i);
            if (row !== null) onOpen(row);
          }}
        >
          ${row === null
            ? html`<span role="gridcell" class="cell-wait">…</span>`
            : cells(row).map((cell, j) => html`<span role="gridcell" class=${`cell-${columns[j].name}${columns[j].number ? " n" : ""}`}>${cell}</span>`)}
        </div>`;
      })}
    </div>
    ${rows.error ? html`<div role="row"><div role="gridcell"><${Failure} error=${rows.error} again=${() => rows.again()} /></div></div>` : null}
    ${rows.length === 0 && !rows.error
      ? html`<div role="row"><div role="gridcell">${rows.complete ? html`<${Empty}>${empty}<//>` : html`<${Loading} />`}</div></div>`
      : null}
  </div>`;
}

/** A number that grows with each call of its function, which shows the component again. */
export function useVersion() {
  return useReducer((/** @type {number} */ before) => before + 1, 0);
}
