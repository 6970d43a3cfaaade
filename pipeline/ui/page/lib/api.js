// Requests to the server. Every answer is JSON; an error has what was wrong and the remedy.

/** An error of the server, or no answer at all (status 0). */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   * @param {string} remedy
   */
  constructor(status, message, remedy) {
    super(message);
    this.status = status;
    this.remedy = remedy;
  }
}

/**
 * The address of an answer about a run.
 * @param {string} run
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} [query]
 */
export function address(run, path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return `api/runs/${encodeURIComponent(run)}/${path}${text ? `?${text}` : ""}`;
}

/**
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function getJson(path, signal) {
  return request(path, { signal, headers: { Accept: "application/json" } });
}

/**
 * @param {string} path
 * @param {unknown} body
 * @returns {Promise<any>}
 */
export function postJson(path, body) {
  const headers = { "Content-Type": "application/json", "X-Rollstream": "1" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body) });
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    const remedy = options.method === "POST" ? "see whether the change was made before you ask for it again" : "it is asked again as soon as it is back";
    throw new ApiError(0, "the server does not answer", remedy);
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  if (answer.status === 401 || answer.status === 403) {
    const remedy = "open the address that `rollstream ui` printed, with its token";
    throw new ApiError(answer.status, body?.error ?? "the server wants the token of this page", body?.remedy ?? remedy);
  }
  throw new ApiError(answer.status, body?.error ?? `the server answered ${answer.status}`, body?.remedy ?? "");
}
