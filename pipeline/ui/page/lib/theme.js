// The theme: that of the system, or the one chosen with the toggle, which the browser keeps.

import { useEffect, useState } from "../vendor/preact-htm.js";

const KEY = "rollstream.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

/** @returns {"light" | "dark"} */
function current() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

/** The theme that was chosen earlier, if any. @returns {"light" | "dark" | null} */
function chosen() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept === "dark" || kept === "light" ? kept : null;
  } catch {
    // Storage may be forbidden; the theme of the system stays.
    return null;
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen() ?? (dark.matches ? "dark" : "light");
  dispatchEvent(new Event("themechange"));
}

/** Apply the theme, and follow that of the system as long as none is chosen. */
export function restoreTheme() {
  apply();
  dark.addEventListener("change", apply);
}

/** Change to the other theme and keep the choice. */
export function toggleTheme() {
  const next = current() === "dark" ? "light" : "dark";
  dark.removeEventListener("change", apply);
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // As above.
  }
  dispatchEvent(new Event("themechange"));
}

/** The theme in force, again after each change. */
export function useTheme() {
  const [theme, setTheme] = useState(current);
  useEffect(() => {
    const changed = () => setTheme(current());
    addEventListener("themechange", changed);
    return () => removeEventListener("themechange", changed);
  }, []);
  return theme;
}
