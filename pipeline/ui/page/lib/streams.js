// Event streams of the server, which all pages of a browser share: each stream occupies one of the six connections that a
// browser opens to a server, so with a stream for each page a seventh page could ask nothing. This module also runs as
// the shared worker that holds the streams; a browser without shared workers holds them in the page.

/** @typedef {"opened" | "failed" | "overview" | "changed"} Event the last two with the data of the server's event */
/** @typedef {{ source: EventSource, ports: Set<MessagePort>, overview: string | null }} Stream */

/** @type {Map<string, Stream>} by address */
const streams = new Map();

addEventListener("connect", (event) => serve(/** @type {MessageEvent} */ (event).ports[0]));

/**
 * Receive the events of a stream until it fails or is closed.
 * @param {string} path
 * @param {(event: Event, data: string) => void} hear
 * @returns {{ close: () => void, fail: () => void }} `fail` gives the stream up for all pages, because it is silent
 */
export function openStream(path, hear) {
  const port = connected(() => hear("failed", ""));
  port.onmessage = ({ data }) => hear(data.event, data.data);
  const close = () => port.postMessage({ leave: true });
  port.postMessage({ join: new URL(path, document.baseURI).href });
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
  let address = "";
  port.onmessage = ({ data }) => {
    if (data.join) join((address = data.join), port);
    else if (data.fail) fail(address);
    else leave(address, port);
  };
}

/**
 * @param {string} address
 * @param {MessagePort} port
 */
function join(address, port) {
  const stream = streams.get(address) ?? opened(address);
  stream.ports.add(port);
  if (stream.source.readyState !== EventSource.OPEN) return;
  port.postMessage({ event: "opened" });
  if (stream.overview !== null) port.postMessage({ event: "overview", data: stream.overview });
}

/**
 * @param {string} address
 * @param {MessagePort} port
 */
function leave(address, port) {
  const stream = streams.get(address);
  stream?.ports.delete(port);
  if (stream?.ports.size === 0) fail(address);
}

/**
 * Close a stream, and tell the pages that still want it.
 * @param {string} address
 */
function fail(address) {
  const stream = streams.get(address);
  if (!stream) return;
  streams.delete(address);
  stream.source.close();
  tell(stream, "failed");
}

/** @param {string} address */
function opened(address) {
  /** @type {Stream} */
  const stream = { source: new EventSource(address), ports: new Set(), overview: null };
  streams.set(address, stream);
  stream.source.onopen = () => tell(stream, "opened");
  stream.source.onerror = () => fail(address);
  stream.source.addEventListener("overview", ({ data }) => tell(stream, "overview", (stream.overview = data)));
  stream.source.addEventListener("changed", ({ data }) => tell(stream, "changed", data));
  return stream;
}

/**
 * @param {Stream} stream
 * @param {Event} event
 * @param {string} [data]
 */
function tell(stream, event, data) {
  for (const port of stream.ports) port.postMessage({ event, data });
}
