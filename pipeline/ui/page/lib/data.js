// An answer of the server as state of a component: asked for when its address changes, and again when `tick` grows.

import { useEffect, useRef, useState } from "../vendor/preact-htm.js";
import { getJson } from "./api.js";

/**
 * @template T
 * @typedef {{ data: T | null, error: Error | null, loading: boolean, again: () => void }} Answer
 */

/**
 * While an address is asked for again, its last answer stays. A question is not given up for a new tick.
 * @template T
 * @param {string | null} path null: nothing to ask for
 * @param {number} [tick]
 * @returns {Answer<T>}
 */
export function useAnswer(path, tick = 0) {
  const [state, setState] = useState(
    /** @returns {{ path: string | null, data: any, error: Error | null }} */ () => ({ path: null, data: null, error: null }),
  );
  const [asked, setAsked] = useState(0);
  const flight = useRef(/** @type {{ path: string, again: boolean, abort: AbortController } | null} */ (null));

  useEffect(() => {
    if (path === null) return;
    const current = flight.current;
    if (current && current.path === path) {
      current.again = true;
      return;
    }
    current?.abort.abort();
    ask(path);
  }, [path, tick, asked]);
  useEffect(() => () => flight.current?.abort.abort(), []);

  /** @param {string} wanted */
  function ask(wanted) {
    const own = { path: wanted, again: false, abort: new AbortController() };
    flight.current = own;
    /** @param {{ data?: any, error: Error | null }} outcome */
    const done = (outcome) => {
      if (flight.current !== own || own.abort.signal.aborted) return;
      flight.current = null;
      setState((before) => ({ path: wanted, data: before.path === wanted ? before.data : null, ...outcome }));
      if (own.again) ask(wanted);
    };
    getJson(wanted, own.abort.signal).then(
      (data) => done({ data, error: null }),
      (error) => done({ error }),
    );
  }

  const known = state.path === path;
  return {
    data: known ? state.data : null,
    error: known ? state.error : null,
    loading: path !== null && (!known || (state.data === null && state.error === null)),
    again: () => setAsked((before) => before + 1),
  };
}
