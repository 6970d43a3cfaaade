// The theme: that of the system, or the one chosen with the toggle, which the browser keeps.

import { useEffect, useState } from "../vendor/preact-htm.js";

const KEY = "rollstream.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

/** @returns {"light" | "dark"} */
function current() {
  const chosen = document.documentElement.dataset.theme;
  return chosen === "dark" || chosen === "light" ? chosen : dark.matches ? "dark" : "light";
}

/** Apply the theme that was chosen earlier. */
export function restoreTheme() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch {
    // Storage may be forbidden; the theme of the system stays.
  }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}

/** Change to the other theme and keep the choice. */
export function toggleTheme() {
  const next = current() === "dark" ? "light" : "dark";
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
    dark.addEventListener("change", changed);
    return () => {
      removeEventListener("themechange", changed);
      dark.removeEventListener("change", changed);
    };
  }, []);
  return theme;
}
