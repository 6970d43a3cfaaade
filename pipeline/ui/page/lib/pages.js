// Rows that the server gives in pages: the first again when something changed, the next ones on request.

import { useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { getJson } from "./api.js";
import { useAnswer } from "./data.js";

/**
 * @template T
 * @param {(after: string | null) => string | null} pathOf the address of the page after a cursor; null: ask nothing
 * @param {number} tick
 * @param {(answer: any) => T[]} [rowsOf]
 */
export function usePages(pathOf, tick, rowsOf = (answer) => answer.rows) {
  const path = pathOf(null);
  const [further, setFurther] = useState(
    /** @returns {{ path: string | null, rows: T[], next: string | null }} */ () => ({ path: null, rows: [], next: null }),
  );
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  const extended = further.path === path && further.rows.length > 0;
  // A first page that is asked for again would shift the pages after it, so it stays while there are such pages.
  const first = useAnswer(path, extended ? 0 : tick);
  const latest = useRef(path);
  latest.current = path;
  useEffect(() => setFailure(null), [path]);

  const firstRows = first.data ? rowsOf(first.data) : [];
  const next = extended ? further.next : (first.data?.next ?? null);
  const more = () => {
    const wanted = next === null ? null : pathOf(next);
    if (busy || wanted === null) return;
    setBusy(true);
    getJson(wanted)
      .then((answer) => {
        if (latest.current !== path) return;
        setFurther((before) => ({
          path,
          rows: [...(before.path === path ? before.rows : []), ...rowsOf(answer)],
          next: answer.next ?? null,
        }));
        setFailure(null);
      }, setFailure)
      .finally(() => setBusy(false));
  };
  return {
    first,
    rows: /** @type {T[]} */ ([...firstRows, ...(extended ? further.rows : [])]),
    more,
    hasMore: next !== null,
    busy,
    failure,
  };
}
