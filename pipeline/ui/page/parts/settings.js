// Settings of a run that differ from the defaults, or among runs.

import { html } from "../vendor/preact-htm.js";
import { Empty, Panel, Table } from "./basics.js";

/** @typedef {import("../contract").Settings} Settings */

/** @param {{ names: string[], sides: Settings[] }} props */
export function SettingsPanel({ names, sides }) {
  const missing = names.filter((_, i) => !sides[i].known);
  const title = sides.length > 1 ? "Settings that differ" : "Settings that were changed";
  if (missing.length > 0) {
    return html`<${Panel} title=${title}><${Empty}>The configuration of ${missing.join(" and ")} is not on this machine.<//><//>`;
  }
  const tables = sides.map((side) => new Map(side.changed.map((each) => [each.key, each.value])));
  const defaults = new Map(sides.flatMap((side) => side.changed.map((each) => [each.key, each.default])));
  const rows = [...defaults]
    .map(([key, standard]) => [key, ...tables.map((table) => table.get(key) ?? standard), ...(sides.length > 1 ? [] : [standard])])
    .filter(([, value, ...others]) => sides.length === 1 || others.some((other) => other !== value));
  const heads = ["Setting", ...(sides.length > 1 ? names : ["Value", "Default"])];
  return html`<${Panel} title=${title}>
    <${Table} caption=${title} heads=${heads} rows=${rows} keys=${rows.map((row) => row[0])}
      empty=${sides.length > 1 ? "All have the same settings." : "All settings are at their defaults."} />
  <//>`;
}
