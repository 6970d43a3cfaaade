// Versions of the weights: size, duration, origin, and who serves which.

import { html, useMemo } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { bytes, count, duration, time, versionText } from "../lib/format.js";
import { link } from "../lib/route.js";
import { Empty, Panel, shown, Table } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";

/** @typedef {import("../contract").Weights} Weights */

const MOST = 200;

/** @param {import("../app").ViewProps} props */
export function WeightsView({ run, live }) {
  const answer = useAnswer(address(run, "weights"), live.tick);
  return shown(answer, (data) => html`<${Versions} weights=${data} run=${run} />`, "the versions");
}

/** @param {{ weights: Weights, run: string }} props */
function Versions({ weights, run }) {
  const versions = useMemo(() => [...weights.versions].sort((a, b) => b.version - a.version), [weights]);
  const oldest = useMemo(() => [...versions].reverse(), [versions]);
  const x = oldest.map((each) => each.version);
  const sizes = useMemo(() => [{ label: "size", x, y: oldest.map((each) => each.bytes) }], [oldest]);
  const times = useMemo(() => [{ label: "time", x, y: oldest.map((each) => each.seconds) }], [oldest]);
  if (versions.length === 0) {
    return html`<${Panel} title="Versions"><${Empty}>No version has been published.<//><//>`;
  }
  const newest = versions[0].version;
  const serving = Object.entries(weights.serving).sort((a, b) => a[0].localeCompare(b[0]));
  return html`
    <${Panel} title="Who serves which" note=${`newest published: ${versionText(newest)}`}>
      <${Table} caption="Versions served by component" heads=${["Component", "Serves", { text: "Behind", number: true }]}
        rows=${serving.map(([component, version]) => [component, versionText(version), newest - version > 0 ? count(newest - version) : "up to date"])}
        empty="No server has reported a version." />
    <//>
    <${Panel} title="Versions" note=${versions.length > MOST ? `the newest ${MOST} of ${count(versions.length)}` : `${count(versions.length)} published`}>
      <div class="charts two">
        <${Chart} title="Size" curves=${sizes} xName="version" format=${bytes} zero sync="versions" />
        ${oldest.some((each) => each.seconds !== null)
          ? html`<${Chart} title="Time to publish" curves=${times} xName="version" format=${duration} zero sync="versions" />`
          : null}
      </div>
      <${Table} caption="Versions, newest first" keys=${versions.slice(0, MOST).map((each) => `${each.learner}/${each.version}`)}
        heads=${["Version", "Learner", { text: "Step", number: true }, "Kind", { text: "Size", number: true }, { text: "Took", number: true }, "Published", "Digest", { text: "Links", quiet: true }]}
        rows=${versions.slice(0, MOST).map((each) => [
          versionText(each.version),
          each.learner,
          count(each.step),
          each.kind,
          bytes(each.bytes),
          duration(each.seconds),
          time(each.created_ms),
          html`<code title=${each.digest}>${each.digest.slice(0, 12)}</code>`,
          html`<a href=${link(run, "rollouts", { version: each.version })}>rollouts<span class="hidden"> of version ${each.version}</span></a>`,
        ])} />
    <//>`;
}
