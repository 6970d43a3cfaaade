// Groups: the spread of their rewards, the share without variance, the mixture of environments, and a list.

import { html, useMemo } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, number, percent, time, versionText, words } from "../lib/format.js";
import { usePages } from "../lib/pages.js";
import { link, replaceQuery } from "../lib/route.js";
import { Bar, BAR, Empty, Failure, More, Panel, shown, Table } from "../parts/basics.js";
import { Bars } from "../parts/bars.js";
import { Chart } from "../parts/chart.js";

/** @typedef {import("../contract").Spread} Spread */
/** @typedef {import("../contract").Group} Group */

/** @param {import("../app").ViewProps} props */
export function GroupsView({ run, runs, live, query }) {
  const mixes = runs.some((each) => each.run === run && each.source === "topics");
  const spread = useAnswer(address(run, "spread", { bins: 20 }), live.tick);
  const mixture = useAnswer(mixes ? address(run, "mixture") : null, live.tick);
  return html`
    <${Panel} title="Spread of reward" note="a group whose members have equal rewards teaches nothing">
      ${shown(spread, (data) => html`<${SpreadOf} spread=${data} run=${run} />`, "the groups")}
    <//>
    ${mixes
      ? html`<${Panel} title="Mixture of environments" note="as each worker draws them">
          ${shown(mixture, (data) => html`<${MixtureOf} mixture=${data} />`, "the mixture")}
        <//>`
      : null}
    <${GroupList} run=${run} tick=${live.tick} query=${query} />`;
}

/** @param {{ spread: Spread, run: string }} props */
function SpreadOf({ spread, run }) {
  const curves = useMemo(
    () => [{ label: "zero variance", x: spread.versions, y: spread.zero_variance_share }],
    [spread],
  );
  const { edges, counts } = spread.histogram;
  const environments = Object.entries(spread.by_environment).sort((a, b) => b[1].groups - a[1].groups);
  if (environments.length === 0) return html`<${Empty}>No group is complete yet.<//>`;
  const between = (/** @type {number} */ i) => `${number(edges[i], 3)} to ${number(edges[i + 1], 3)}`;
  return html`
    <div class="charts two">
      <${Chart} title="Share of groups without variance" curves=${curves} xName="version" format=${percent} zero />
      <figure class="chart">
        <figcaption><span class="chart-title">Standard deviation of reward</span><span class="chart-at">groups by bin</span></figcaption>
        <${Bars} counts=${counts} height=${150} label=${`Histogram of the standard deviation of reward, ${counts.length} bins from ${number(edges[0], 3)} to ${number(edges[edges.length - 1], 3)}`}
          titles=${(/** @type {number} */ i) => `${between(i)}: ${count(counts[i])} groups`} />
        <p class="range muted"><span>${number(edges[0], 3)}</span><span>${number(edges[edges.length - 1], 3)}</span></p>
        <details>
          <summary>Table<span class="hidden"> of the standard deviation</span></summary>
          <${Table} caption="Groups by standard deviation of reward" heads=${["Standard deviation", { text: "Groups", number: true }]}
            rows=${counts.map((n, i) => [between(i), count(n)])} />
        </details>
      </figure>
    </div>
    <${Table} caption="Groups by environment" keys=${environments.map(([name]) => name)}
      heads=${["Environment", { text: "Groups", number: true }, { text: "Zero variance", number: true }, { text: "Share", number: true }, BAR]}
      rows=${environments.map(([name, each]) => [
        html`<a href=${link(run, "rollouts", { environment: name })}>${name}</a>`,
        count(each.groups),
        count(each.zero_variance),
        percent(each.groups ? each.zero_variance / each.groups : 0),
        html`<${Bar} share=${each.groups ? each.zero_variance / each.groups : 0} />`,
      ])} />`;
}

/** @param {{ mixture: import("../contract").Mixture }} props */
function MixtureOf({ mixture }) {
  const rows = mixture.workers.flatMap(({ worker, environments }) => {
    const all = environments.reduce((sum, each) => sum + (each.weight ?? 0), 0);
    return environments.map((each) => [
      worker,
      each.environment,
      number(each.weight, 3),
      html`<${Bar} share=${all ? (each.weight ?? 0) / all : 0} />`,
      count(each.drawn),
      percent(each.success),
      each.pools ? poolsOf(each.pools) : "–",
      each.unlocked === null ? "–" : each.unlocked ? "unlocked" : "locked",
    ]);
  });
  return html`<${Table} caption="Mixture by worker" rows=${rows} empty="No worker has recorded a mixture."
    heads=${["Worker", "Environment", { text: "Weight", number: true }, BAR, { text: "Drawn", number: true }, { text: "Success", number: true }, "Prompts by last group", "Stage"]} />`;
}

/** @param {Record<string, number>} pools */
function poolsOf(pools) {
  return ["easy", "hard", "other"].map((name) => `${count(pools[name])} ${name}`).join(", ");
}

/** @param {{ run: string, tick: number, query: Record<string, string> }} props */
function GroupList({ run, tick, query }) {
  const facets = useAnswer(address(run, "facets"), tick);
  const environments = /** @type {string[]} */ (facets.data?.environments ?? []);
  const { environment = "", zero_variance = "", order = "newest" } = query;
  /** @type {ReturnType<typeof usePages<Group>>} */
  const pages = usePages((after) => address(run, "groups", { environment, zero_variance, order, after, limit: 50 }), tick);
  const change = (/** @type {string} */ name) => (/** @type {Event} */ event) =>
    replaceQuery({ [name]: /** @type {HTMLSelectElement} */ (event.target).value });
  const filters = html`<form class="filters" onSubmit=${(/** @type {Event} */ event) => event.preventDefault()}>
    <label>Environment <select value=${environment} onChange=${change("environment")}>
      <option value="">all</option>
      ${environments.map((name) => html`<option value=${name}>${name}</option>`)}
    </select></label>
    <label>Variance <select value=${zero_variance} onChange=${change("zero_variance")}>
      <option value="">all</option><option value="true">none</option><option value="false">some</option>
    </select></label>
    <label>Order <select value=${order} onChange=${change("order")}>
      <option value="newest">newest</option><option value="spread">widest spread</option>
    </select></label>
  </form>`;
  return html`<${Panel} title="Groups">
    ${filters}
    ${shown(
      pages.first,
      (data) => html`
        <${Table} caption="Groups" empty="No group matches." keys=${pages.rows.map((each) => each.group + each.members[0])}
          heads=${["Environment", "Example", "Version", { text: "Size", number: true }, { text: "Mean", number: true }, { text: "Std", number: true }, "Lowest to highest", "Fate", "Sealed", { text: "Links", quiet: true }]}
          rows=${pages.rows.map((each) => cells(each, run))} />
        ${pages.failure ? html`<${Failure} error=${pages.failure} again=${pages.more} />` : null}
        <${More} more=${pages.hasMore} busy=${pages.busy} onMore=${pages.more} shown=${pages.rows.length} total=${data.matching} />`,
      "the groups",
    )}
  <//>`;
}

/**
 * @param {Group} group
 * @param {string} run
 */
function cells(group, run) {
  return [
    group.environment,
    group.example,
    versionText(group.version),
    count(group.size),
    number(group.mean, 3),
    group.zero_variance ? html`<span class="warn-text">0, no variance</span>` : number(group.std, 3),
    `${number(group.min, 3)} to ${number(group.max, 3)}`,
    words(group.fate),
    time(group.time_ms),
    html`<a href=${link(run, "rollouts", { group: group.group, environment: group.environment, example: group.example, version: group.version, open: group.members[0] })}>members</a>`,
  ];
}
