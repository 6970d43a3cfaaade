// Numbers, times and sizes as text.

const DASH = "–";

/**
 * A number with at most `digits` significant digits; a dash where there is none.
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return value === 0 ? "0" : value.toExponential(Math.max(0, digits - 2));
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(digits, Math.floor(Math.log10(size)) + 1) });
}

/**
 * A count in few characters: 12,345 or 1.2 M.
 * @param {number | null | undefined} value
 */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  for (const [size, unit] of /** @type {[number, string][]} */ ([[1e12, "T"], [1e9, "G"], [1e6, "M"]])) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(value / size >= 100 ? 0 : 1)} ${unit}`;
  }
  return Math.round(value).toLocaleString("en-US");
}

/**
 * A count with all its digits.
 * @param {number | null | undefined} value
 */
export function whole(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? DASH : Math.round(value).toLocaleString("en-US");
}

/**
 * A rate in few characters.
 * @param {number | null | undefined} value
 */
export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return Math.abs(value) >= 100 ? count(value) : value.toFixed(Math.abs(value) >= 10 || value === 0 ? 1 : 2);
}

/**
 * A number with its sign.
 * @param {number | null | undefined} value
 */
export function signed(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return value > 0 ? `+${number(value, 3)}` : value < 0 ? `−${number(-value, 3)}` : "0";
}

/**
 * A share in percent.
 * @param {number | null | undefined} value
 */
export function percent(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
}

/**
 * A size in bytes, with binary units.
 * @param {number | null | undefined} value
 */
export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(size >= 100 ? 0 : 1)} ${units[unit]}`;
}

/**
 * A length of time.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  if (seconds < 0.001) return "0 ms";
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

/**
 * A time of day, with its date if that is not today.
 * @param {number | null | undefined} ms
 */
export function time(ms) {
  if (!ms || !Number.isFinite(ms)) return DASH;
  const at = new Date(ms);
  const clock = at.toLocaleTimeString("en-GB");
  if (at.toDateString() === new Date().toDateString()) return clock;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}`;
}

/** @param {number} value */
function two(value) {
  return String(value).padStart(2, "0");
}

/**
 * A policy version; -1 is the state before the first, and a dash stands where there can be none.
 * @param {number | string | null | undefined} version
 */
export function versionText(version) {
  if (version === null || version === undefined || version === "") return DASH;
  if (version === -1) return "none";
  return `v${version}`;
}

/**
 * The name of a fate or reason for people.
 * @param {string | null | undefined} name
 */
export function words(name) {
  return (name ?? "").replaceAll("_", " ");
}

/**
 * A value of any kind on one line.
 * @param {unknown} value
 * @returns {string}
 */
export function plain(value) {
  if (value === null || value === undefined) return DASH;
  if (typeof value === "number") return number(value, 6);
  if (typeof value === "string") return value;
  return JSON.stringify(value);
}
