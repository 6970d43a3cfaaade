// Small parts of every view: panels, states, figures, tables, badges, a dialog that asks.

import { html, useEffect, useRef } from "../vendor/preact-htm.js";
import { whole, words } from "../lib/format.js";

/** @typedef {import("../vendor/preact-htm").Child} Child */

/** Signs of fates: a shape each, so that colour is never the only difference. */
export const FATE_SIGNS = /** @type {Record<string, string>} */ ({
  trained: "●",
  batched: "◐",
  in_flight: "○",
  unread: "·",
  skipped: "⊘",
  dropped: "×",
  dead_lettered: "▲",
  control: "◇",
});

/** @param {{ title: string, note?: Child, actions?: Child, children?: Child, wide?: boolean, id?: string }} props */
export function Panel({ title, note, actions, children, wide, id }) {
  const label = `h-${id ?? title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}`;
  return html`<section class=${wide ? "panel wide" : "panel"} aria-labelledby=${label}>
    <div class="panel-head">
      <h2 id=${label}>${title}</h2>
      ${note ? html`<p class="note">${note}</p>` : null}
      ${actions ? html`<div class="actions">${actions}</div>` : null}
    </div>
    ${children}
  </section>`;
}

/** @param {{ children?: Child }} props */
export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/** @param {{ what?: string }} props */
export function Loading({ what }) {
  return html`<p class="loading" role="status"><span class="pulse" aria-hidden="true"></span>Reading ${what ?? ""}…</p>`;
}

/** @param {{ error: Error, again?: () => void }} props */
export function Failure({ error, again }) {
  const remedy = "remedy" in error ? String(error.remedy) : "";
  return html`<div class="failure" role="alert">
    <p><strong>Not shown:</strong> ${error.message}</p>
    ${remedy ? html`<p class="remedy">${remedy}</p>` : null}
    ${again ? html`<button type="button" onClick=${again}>Try again</button>` : null}
  </div>`;
}

/**
 * The states before an answer, then what `show` makes of it. A failure after an answer stands above the old answer.
 * @template T
 * @param {import("../lib/data").Answer<T>} answer
 * @param {(data: T) => Child} show
 * @param {string} [what]
 */
export function shown(answer, show, what) {
  if (answer.data !== null) {
    return html`${answer.error ? html`<${Failure} error=${answer.error} again=${answer.again} />` : null}${show(answer.data)}`;
  }
  if (answer.error) return html`<${Failure} error=${answer.error} again=${answer.again} />`;
  return html`<${Loading} what=${what} />`;
}

/** @param {{ fate: string, reason?: string | null }} props */
export function Fate({ fate, reason }) {
  const sign = FATE_SIGNS[fate] ?? "?";
  return html`<span class="fate fate-${fate}"><span class="sign" aria-hidden="true">${sign}</span> ${words(fate)}${
    reason ? html`<span class="reason">: ${words(reason)}</span>` : null
  }</span>`;
}

/**
 * A number under its label; where it is shown in few characters, `exact` has all its digits.
 * @param {{ label: string, value: Child, exact?: number, note?: Child, tone?: string, href?: string }} props
 */
export function Figure({ label, value, exact, note, tone, href }) {
  return html`<div class=${`figure ${tone ?? ""}`}>
    <dt>${label}</dt>
    <dd class="value" title=${exact === undefined ? undefined : whole(exact)}>${href ? html`<a href=${href}>${value}</a>` : value}</dd>
    ${note ? html`<dd class="under">${note}</dd>` : null}
  </div>`;
}

/** The head of a column of bars. */
export const BAR = { text: "Share as a bar", quiet: true };

/**
 * A table that scrolls within itself where it is too wide.
 * @param {{ caption: string, heads: (string | { text: string, number?: boolean, quiet?: boolean })[], rows: Child[][], keys?: string[],
 *   showCaption?: boolean, empty?: Child }} props
 */
export function Table({ caption, heads, rows, keys, showCaption, empty }) {
  if (rows.length === 0 && empty) return html`<${Empty}>${empty}<//>`;
  const columns = heads.map((head) => ({ number: false, quiet: false, ...(typeof head === "string" ? { text: head } : head) }));
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${`Table: ${caption}`}>
    <table>
      <caption class=${showCaption ? "" : "hidden"}>${caption}</caption>
      <thead>
        <tr>${columns.map((column) => html`<th scope="col" class=${column.number ? "n" : ""}>${column.quiet ? html`<span class="hidden">${column.text}</span>` : column.text}</th>`)}</tr>
      </thead>
      <tbody>
        ${rows.map(
          (row, i) => html`<tr key=${keys ? keys[i] : i}>
            ${row.map((cell, j) => html`<td class=${columns[j]?.number ? "n" : ""}>${cell}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/**
 * Names and values.
 * @param {{ items: [string, Child][] }} props
 */
export function Facts({ items }) {
  return html`<dl class="facts">
    ${items.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/**
 * A bar of a share, with its length in words beside it.
 * @param {{ share: number, tone?: string }} props
 */
export function Bar({ share, tone }) {
  const width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return html`<span class="bar" aria-hidden="true"><span class=${tone ?? ""} style=${{ width }}></span></span>`;
}

/**
 * A dialog that asks before something is changed.
 * @param {{ title: string, confirm: string, busy?: boolean, onConfirm: () => void, onCancel: () => void, children?: Child }} props
 */
export function Confirm({ title, confirm, busy, onConfirm, onCancel, children }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    const before = /** @type {HTMLElement | null} */ (document.activeElement);
    dialog.current?.showModal();
    return () => before?.focus?.();
  }, []);
  /** @param {Event} event */
  const cancelled = (event) => {
    event.preventDefault();
    onCancel();
  };
  return html`<dialog ref=${dialog} onCancel=${cancelled} aria-labelledby="confirm-title">
    <h2 id="confirm-title">${title}</h2>
    <div class="dialog-body">${children}</div>
    <div class="dialog-actions">
      <button type="button" onClick=${onCancel}>Cancel</button>
      <button type="button" class="primary" disabled=${busy} onClick=${onConfirm}>${busy ? "Sending…" : confirm}</button>
    </div>
  </dialog>`;
}

/**
 * Rows that come in pages, one after the other.
 * @param {{ more: boolean, busy: boolean, onMore: () => void, shown: number, total?: number | null }} props
 */
export function More({ more, busy, onMore, shown: count, total }) {
  return html`<p class="more">
    <span>${count.toLocaleString("en-US")}${total !== null && total !== undefined ? ` of ${total.toLocaleString("en-US")}` : ""} shown</span>
    ${more ? html`<button type="button" disabled=${busy} onClick=${onMore}>${busy ? "Reading…" : "More"}</button>` : null}
  </p>`;
}
