// Routes in the hash of the address: #/RUN/VIEW?name=value. A link restores the view, its filters and what is open.

import { useEffect, useState } from "../vendor/preact-htm.js";

/** @typedef {{ run: string, view: string, query: Record<string, string> }} Route */

/**
 * @param {string} hash
 * @returns {Route}
 */
export function parse(hash) {
  const [path, query] = split(hash.replace(/^#\/?/, ""), "?");
  const [run, view] = path.split("/");
  return { run: decoded(run ?? ""), view: decoded(view ?? ""), query: Object.fromEntries(new URLSearchParams(query)) };
}

/**
 * @param {string} run
 * @param {string} [view]
 * @param {Record<string, string | number | null | undefined>} [query]
 */
export function link(run, view = "run", query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return `#/${encodeURIComponent(run)}/${view}${text ? `?${text}` : ""}`;
}

/**
 * Change a part of the query in place, without an entry in the history.
 * @param {Record<string, string | number | null | undefined>} changes
 */
export function replaceQuery(changes) {
  const { run, view, query } = parse(location.hash);
  history.replaceState(null, "", link(run, view, { ...query, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** The route of the address, again after each change. */
export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

/**
 * @param {string} text
 * @param {string} at
 */
function split(text, at) {
  const place = text.indexOf(at);
  return place < 0 ? [text, ""] : [text.slice(0, place), text.slice(place + 1)];
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
