// Server-sent events of a run: its overview, and what changed in the index. A connection that is lost is opened again
// until the server is back, and then everything on the page is asked for again.

import { useEffect, useState } from "../vendor/preact-htm.js";
import { address, ApiError, getJson } from "./api.js";
import { openEvents } from "./streams.js";

/** @typedef {import("../contract").Overview} Overview */
/** @typedef {"connecting" | "open" | "lost" | "refused"} Connection */
/** @typedef {{ overview: Overview | null, connection: Connection, tick: number, error: Error | null }} Live */

const RETRY_MS = [500, 1000, 2000, 4000];
const SILENT_MS = 40_000; // The server sends an overview at least every 14 s.
const REFRESH_MS = 2000;
const REFUSED = [401, 403, 404, 421];

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
  /** @type {ReturnType<typeof openEvents> | null} */
  let stream = null;
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
  const open = () => {
    if (!ended) stream = openEvents(run, hear);
  };
  /** @type {Parameters<typeof openEvents>[1]} */
  const hear = (event, value) => {
    heardAt = Date.now();
    if (event === "failed") return lost();
    if (event === "opened") {
      const again = failures > 0;
      failures = 0;
      update(() => ({ connection: "open" }));
      if (again) tick();
    } else if (event === "overview") {
      update(() => ({ overview: value, error: null, connection: "open" }));
    } else if (refresh === undefined) {
      refresh = setTimeout(tick, Math.max(0, lastTick + REFRESH_MS - Date.now()));
    }
  };
  const lost = () => {
    stream?.close();
    if (ended) return;
    const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    update(({ connection }) => ({ connection: connection === "refused" ? connection : "lost" }));
    clearTimeout(retry);
    retry = setTimeout(open, wait);
    askWhy();
  };
  // A stream that fails does not tell whether the server is gone or refuses this page; another answer does.
  const askWhy = () => {
    /** @param {Connection} connection */
    const notRefused = (connection) => (connection === "refused" ? "lost" : connection);
    getJson(address(run, "overview")).then(
      (answer) => {
        if (!ended) update(({ overview, connection }) => ({ overview: overview ?? answer, connection: notRefused(connection) }));
      },
      (error) => {
        if (ended) return;
        if (error instanceof ApiError && REFUSED.includes(error.status)) update(() => ({ error, connection: "refused" }));
        else update((before) => ({ error: before.overview ? before.error : error, connection: notRefused(before.connection) }));
      },
    );
  };
  const watch = setInterval(() => {
    if (Date.now() - heardAt > SILENT_MS) {
      heardAt = Date.now();
      stream?.fail();
      lost();
    }
  }, 5000);
  /** @param {PageTransitionEvent} event */
  const shownAgain = (event) => {
    if (event.persisted) lost();
  };
  addEventListener("pageshow", shownAgain);

  askWhy();
  open();
  return () => {
    ended = true;
    stream?.close();
    removeEventListener("pageshow", shownAgain);
    clearTimeout(retry);
    clearTimeout(refresh);
    clearInterval(watch);
  };
}
