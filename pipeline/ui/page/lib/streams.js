// Events of runs, which all pages of a browser receive over one stream: a stream occupies one of the six connections that a
// browser opens to a server, so with a stream for each page or run a seventh could ask nothing. This module also runs as
// the shared worker that holds the stream; a browser without shared workers holds a stream in each page.

/** @typedef {"opened" | "failed" | "overview" | "changed"} Event the last two with the value that the server sent */
/** @typedef {{ ports: Set<MessagePort>, overview: unknown }} Hearers */
/** @typedef {{ source: EventSource, runs: Set<string> }} Stream */

const GATHER_MS = 50;

/** Pages by run. @type {Map<string, Hearers>} */
const hearers = new Map();
/** The stream that is open, with its runs. @type {Stream | null} */
let stream = null;
/** The one that will replace it once it is open. @type {Stream | null} */
let next = null;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let gathering;
let base = "";

addEventListener("connect", (event) => serve(/** @type {MessageEvent} */ (event).ports[0]));

/**
 * Receive the events of a run until they fail or are closed.
 * @param {string} run
 * @param {(event: Event, value: any) => void} hear
 * @returns {{ close: () => void, fail: () => void }} `fail` ends the events of the run for all pages, because none came
 */
export function openEvents(run, hear) {
  const port = connected(() => hear("failed", null));
  port.onmessage = ({ data }) => hear(data.event, data.value);
  const close = () => port.postMessage({ leave: true });
  port.postMessage({ join: run, base: document.baseURI });
  addEventListener("pagehide", close); // A worker is not told that a page is gone.
  return {
    close: () => {
      removeEventListener("pagehide", close);
      port.onmessage = null;
      close();
    },
    fail: () => port.postMessage({ fail: true }),
  };
}

/** @param {() => void} failed */
function connected(failed) {
  if (typeof SharedWorker === "undefined") {
    const { port1, port2 } = new MessageChannel();
    serve(port2);
    return port1;
  }
  const worker = new SharedWorker(import.meta.url, { type: "module" });
  worker.onerror = failed;
  return worker.port;
}

/** @param {MessagePort} port */
function serve(port) {
  let run = "";
  port.onmessage = ({ data }) => {
    if (data.join) {
      base = data.base;
      join((run = data.join), port);
    } else if (data.fail) fail(run);
    else leave(run, port);
  };
}

/**
 * @param {string} run
 * @param {MessagePort} port
 */
function join(run, port) {
  const heard = hearers.get(run) ?? { ports: new Set(), overview: null };
  heard.ports.add(port);
  hearers.set(run, heard);
  if (!stream?.runs.has(run)) return gather();
  port.postMessage({ event: "opened" });
  if (heard.overview !== null) port.postMessage({ event: "overview", value: heard.overview });
}

/**
 * @param {string} run
 * @param {MessagePort} port
 */
function leave(run, port) {
  const heard = hearers.get(run);
  heard?.ports.delete(port);
  if (heard?.ports.size === 0) fail(run);
}

/**
 * End the events of a run, and tell the pages that still want them, which join again.
 * @param {string} run
 */
function fail(run) {
  const heard = hearers.get(run);
  if (!heard) return;
  hearers.delete(run);
  stream?.runs.delete(run);
  tell(heard, "failed");
  gather();
}

/** Open a stream for the runs that are wanted now, once the pages that open together have joined. */
function gather() {
  gathering ??= setTimeout(() => {
    gathering = undefined;
    next?.source.close();
    next = null;
    if (hearers.size > 0) open();
    else {
      stream?.source.close();
      stream = null;
    }
  }, GATHER_MS);
}

function open() {
  const runs = new Set(hearers.keys());
  const query = new URLSearchParams([...runs].map((run) => ["run", run]));
  const source = new EventSource(new URL(`api/events?${query}`, base));
  /** @type {Stream} */
  const opened = { source, runs };
  next = opened;
  source.onopen = () => {
    if (next !== opened) return;
    stream?.source.close();
    stream = opened;
    next = null;
    for (const run of runs) tell(hearers.get(run), "opened");
  };
  source.onerror = () => {
    source.close();
    if (next !== opened && stream !== opened) return;
    next?.source.close();
    stream?.source.close();
    next = stream = null;
    for (const run of [...hearers.keys()]) fail(run);
  };
  source.addEventListener("overview", ({ data }) => {
    const { run, value } = JSON.parse(data);
    const heard = hearers.get(run);
    if (heard) heard.overview = value;
    tell(heard, "overview", value);
  });
  source.addEventListener("changed", ({ data }) => {
    const { run, value } = JSON.parse(data);
    tell(hearers.get(run), "changed", value);
  });
  source.addEventListener("unknown", ({ data }) => fail(JSON.parse(data).run));
}

/**
 * @param {Hearers | undefined} heard
 * @param {Event} event
 * @param {unknown} [value]
 */
function tell(heard, event, value) {
  for (const port of heard?.ports ?? []) port.postMessage({ event, value });
}
