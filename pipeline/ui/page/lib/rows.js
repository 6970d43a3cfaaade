// Rows of a long list, read in pages through cursors. Pages far from what is shown are given up and read again when
// they come into view, so that memory is bounded however far one scrolls. Where the number of rows is known, the list has
// its whole length at once, and a page anywhere is named by the rows between it and the first page.

import { getJson } from "./api.js";

export const PAGE_ROWS = 100;
const KEPT_PAGES = 40;
const MOST_ASKED = 2;

/**
 * @template T
 */
export class Rows {
  /**
   * @param {(after: string | null, skip: number) => string} pathOf the address of the page so many rows behind a cursor
   * @param {() => void} changed called when rows came, or an error
   */
  constructor(pathOf, changed) {
    this._pathOf = pathOf;
    this._changed = changed;
    /** @type {{ cursor: string | null, skip: number, rows: T[] | null }[]} */
    this._pages = [{ cursor: null, skip: 0, rows: null }];
    /** @type {Set<number>} */
    this._asked = new Set();
    this._abort = new AbortController();
    this._shown = 0;
    this._until = 0;
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
    this._until = last;
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
    // Who drags the list along passes many pages: when an answer comes, those in view then are asked for.
    if (this._asked.has(i) || this._asked.size >= MOST_ASKED || this.error) return;
    this._asked.add(i);
    const page = this._pages[i];
    getJson(this._pathOf(page.cursor, page.skip), this._abort.signal).then(
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
    if (i === 0 && this.exact && this.matching !== null && answer.next !== null) this._spread(this.matching, answer.next);
    else if (i === this._pages.length - 1 && !this.complete) {
      this.length = i * PAGE_ROWS + answer.rows.length;
      if (answer.next === null || answer.rows.length < PAGE_ROWS) this.complete = true;
      else this._pages.push({ cursor: answer.next, skip: 0, rows: null });
    }
    if (this._pages.filter((page) => page.rows).length > KEPT_PAGES) {
      this._pages.forEach((page, j) => {
        if (Math.abs(j - this._shown) > KEPT_PAGES / 2) page.rows = null;
      });
    }
    this.need(this._shown * PAGE_ROWS, this._until);
    this._changed();
  }

  /**
   * Give the list all its pages behind the first.
   * @param {number} length
   * @param {string} next cursor behind the first page
   */
  _spread(length, next) {
    if (this.complete) return;
    this.length = length;
    this.complete = true;
    for (let skip = 0; skip < length - PAGE_ROWS; skip += PAGE_ROWS) this._pages.push({ cursor: next, skip, rows: null });
  }
}
