// Server-sent events of a run: its overview, and what changed in the index. A connection that is lost is opened again
// until the server is back, and then everything on the page is asked for again.

import { useEffect, useState } from "../vendor/preact-htm.js";
import { address, getJson } from "./api.js";

/** @typedef {import("../contract").Overview} Overview */
/** @typedef {"connecting" | "open" | "lost"} Connection */
/** @typedef {{ overview: Overview | null, connection: Connection, tick: number, error: Error | null }} Live */

const RETRY_MS = [500, 1000, 2000, 4000];
const SILENT_MS = 40_000; // The server sends an overview every 15 s.
const REFRESH_MS = 2000;

/**
 * The state of a run as the server reports it. `tick` grows when views should ask again.
 * @param {string} run
 * @returns {Live}
 */
export function useLive(run) {
  const [live, setLive] = useState(/** @returns {Live} */ () => fresh());
  useEffect(() => {
    setLive(fresh());
    if (!run) return undefined;
    return follow(run, (change) => setLive((before) => ({ ...before, ...change(before) })));
  }, [run]);
  return live;
}

/** @returns {Live} */
function fresh() {
  return { overview: null, connection: "connecting", tick: 0, error: null };
}

/**
 * @param {string} run
 * @param {(change: (before: Live) => Partial<Live>) => void} update
 * @returns {() => void} ends it
 */
function follow(run, update) {
  let failures = 0;
  let heardAt = Date.now();
  let lastTick = 0;
  let ended = false;
  /** @type {EventSource | null} */
  let source = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let retry;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let refresh;

  const tick = () => {
    clearTimeout(refresh);
    refresh = undefined;
    lastTick = Date.now();
    update((before) => ({ tick: before.tick + 1 }));
  };
  const heard = () => {
    heardAt = Date.now();
  };
  const open = () => {
    if (ended) return;
    source = new EventSource(address(run, "events"));
    source.onopen = () => {
      heard();
      const again = failures > 0;
      failures = 0;
      update(() => ({ connection: "open" }));
      if (again) tick();
    };
    source.onerror = lost;
    source.addEventListener("overview", (event) => {
      heard();
      const overview = JSON.parse(event.data);
      update(() => ({ overview, error: null }));
    });
    source.addEventListener("changed", () => {
      heard();
      if (refresh === undefined) refresh = setTimeout(tick, Math.max(0, lastTick + REFRESH_MS - Date.now()));
    });
  };
  const lost = () => {
    source?.close();
    if (ended) return;
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    update(() => ({ connection: "lost" }));
    clearTimeout(retry);
    retry = setTimeout(open, wait);
  };
  const watch = setInterval(() => {
    if (Date.now() - heardAt > SILENT_MS) {
      heard();
      lost();
    }
  }, 5000);

  getJson(address(run, "overview")).then(
    (overview) => update((before) => ({ overview: before.overview ?? overview })),
    (error) => update((before) => (before.overview ? {} : { error })),
  );
  open();
  return () => {
    ended = true;
    source?.close();
    clearTimeout(retry);
    clearTimeout(refresh);
    clearInterval(watch);
  };
}
