// Rows of a long list, read in pages through cursors. Pages far from what is shown are given up and read again when
// they come into view, so that memory is bounded however far one scrolls.

import { getJson } from "./api.js";

export const PAGE_ROWS = 100;
const KEPT_PAGES = 40;

/**
 * @template T
 */
export class Rows {
  /**
   * @param {(after: string | null) => string} pathOf the address of the page after a cursor
   * @param {() => void} changed called when rows came, or an error
   */
  constructor(pathOf, changed) {
    this._pathOf = pathOf;
    this._changed = changed;
    /** @type {{ cursor: string | null, rows: T[] | null }[]} */
    this._pages = [{ cursor: null, rows: null }];
    /** @type {Set<number>} */
    this._asked = new Set();
    this._abort = new AbortController();
    this._shown = 0;
    /** Rows known so far; all of them once `complete`. */
    this.length = 0;
    this.complete = false;
    /** @type {number | null} */
    this.matching = null;
    this.exact = true;
    /** @type {Error | null} */
    this.error = null;
  }

  /** Give up what was asked. */
  close() {
    this._abort.abort();
  }

  /**
   * The row at an index; null while it is not here.
   * @param {number} index
   * @returns {T | null}
   */
  at(index) {
    return this._pages[Math.floor(index / PAGE_ROWS)]?.rows?.[index % PAGE_ROWS] ?? null;
  }

  /**
   * The index of a row among those that are here; -1 without it.
   * @param {(row: T) => boolean} wanted
   */
  find(wanted) {
    for (const [i, page] of this._pages.entries()) {
      const found = page.rows ? page.rows.findIndex(wanted) : -1;
      if (found >= 0) return i * PAGE_ROWS + found;
    }
    return -1;
  }

  /**
   * Read what is missing among some rows; the next page when they come near the end.
   * @param {number} first
   * @param {number} last
   */
  need(first, last) {
    this._shown = Math.floor(first / PAGE_ROWS);
    const end = Math.min(Math.floor(last / PAGE_ROWS), this._pages.length - 1);
    for (let i = this._shown; i <= end; i += 1) if (this._pages[i].rows === null) this._read(i);
  }

  /** Ask again after an error. */
  again() {
    this.error = null;
    this.need(this._shown * PAGE_ROWS, (this._shown + 1) * PAGE_ROWS);
    this._changed();
  }

  /** @param {number} i */
  _read(i) {
    if (this._asked.has(i) || this.error) return;
    this._asked.add(i);
    getJson(this._pathOf(this._pages[i].cursor), this._abort.signal).then(
      (answer) => this._came(i, answer),
      (error) => {
        if (this._abort.signal.aborted) return;
        this._asked.delete(i);
        this.error = error;
        this._changed();
      },
    );
  }

  /**
   * @param {number} i
   * @param {import("../contract").Page<T>} answer
   */
  _came(i, answer) {
    this._asked.delete(i);
    this._pages[i].rows = answer.rows;
    if (i === 0) {
      this.matching = answer.matching ?? null;
      this.exact = answer.matching_exact ?? true;
    }
    if (i === this._pages.length - 1) {
      this.length = i * PAGE_ROWS + answer.rows.length;
      if (answer.next === null || answer.rows.length < PAGE_ROWS) this.complete = true;
      else this._pages.push({ cursor: answer.next, rows: null });
    }
    if (this._pages.filter((page) => page.rows).length > KEPT_PAGES) {
      this._pages.forEach((page, j) => {
        if (Math.abs(j - this._shown) > KEPT_PAGES / 2) page.rows = null;
      });
    }
    this._changed();
  }
}
