// The run: its flow, key numbers, curves, and the processes that report.

import { html, useEffect, useMemo } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { count, duration, number, percent, rate, versionText } from "../lib/format.js";
import { link, replaceQuery } from "../lib/route.js";
import { Bar, BAR, Empty, Figure, Loading, Panel, shown, Table } from "../parts/basics.js";
import { Curves } from "../parts/curves.js";
import { EvaluationsPanel } from "../parts/evaluations.js";
import { Flow } from "../parts/flow.js";
import { SettingsPanel } from "../parts/settings.js";

/** @param {import("../app").ViewProps} props */
export function RunView({ run, live, query }) {
  const overview = live.overview;
  const settings = useAnswer(address(run, "settings"));
  useEffect(() => {
    if (query.at === "curves") document.getElementById("h-curves")?.scrollIntoView();
  }, [query.at, overview !== null]);
  if (!overview) return live.error || live.connection === "lost" ? null : html`<${Loading} what="the run" />`;
  const top = overview.top;
  return html`
    <${Panel} title="Flow" note=${age(top)}>
      ${top.stalled ? html`<p class="stalled" role="status">Stalled at ${top.stalled_stage}: ${top.stalled}.</p>` : null}
      <${Flow} top=${top} live=${overview.live} run=${run} />
    <//>
    <${KeyNumbers} top=${top} run=${run} />
    <${CurvesPanel} run=${run} tick=${live.tick} query=${query} />
    <${EvaluationsPanel} run=${run} tick=${live.tick} learner=${query.learner ?? ""} />
    <div class="columns">
      <${Staleness} top=${top} />
      <${Processes} top=${top} />
    </div>
    ${settings.data ? html`<${SettingsPanel} names=${[run]} sides=${[settings.data]} />` : null}`;
}

/** @param {import("../contract").Top} top */
function age(top) {
  return `${duration(top.seconds)} of records, the newest ${duration(top.quiet_s)} ago`;
}

/** @param {{ top: import("../contract").Top, run: string }} props */
function KeyNumbers({ top, run }) {
  const dropped = Object.values(top.dropped).reduce((sum, n) => sum + n, 0);
  const lag = top.unread + top.in_flight;
  return html`<${Panel} title="Key numbers">
    <dl class="figures">
      <${Figure} label="Mean reward" value=${number(top.rollouts ? top.reward : null, 3)} note=${`success ${percent(top.rollouts ? top.success : null)}, newest rollouts`} />
      <${Figure} label="Step" value=${count(top.step)} exact=${top.step} note=${`${rate(top.steps_per_s)} per second`} />
      <${Figure} label="Policy" value=${versionText(top.policy_version)} note=${`rollouts by ${versionText(top.sampled_version)}`} href=${link(run, "weights")} />
      <${Figure} label="Rollouts" value=${count(top.rollouts)} exact=${top.rollouts} note=${`${rate(top.rollouts_per_s)} per second`} href=${link(run, "rollouts")} />
      <${Figure} label="Trained" value=${count(top.trained)} exact=${top.trained} note=${`${count(top.skipped)} skipped`} href=${link(run, "rollouts", { fate: "trained" })} />
      <${Figure} label="Before a batch" value=${count(lag)} exact=${lag} note=${`${count(top.unread)} unread, ${count(top.in_flight)} in flight`} />
      <${Figure} label="Batches waiting" value=${count(top.waiting)} exact=${top.waiting} note=${`of ${count(top.batches)}`} />
      <${Figure} label="Dropped" value=${count(dropped)} exact=${dropped} note=${percent(top.rollouts ? dropped / top.rollouts : null)} href=${link(run, "drops")} />
      <${Figure} label="Dead letters" value=${count(top.dead_lettered)} exact=${top.dead_lettered} href=${link(run, "letters")} tone=${top.dead_lettered ? "warn" : ""} />
      ${top.configuration ? html`<${Figure} label="Configuration" value=${count(top.configuration.generation)} note=${`${top.configuration.estimator ?? "not known yet"}, marks ${top.configuration.mark_keys ? "signed" : "unsigned"}`} />` : null}
      ${top.records_skipped ? html`<${Figure} label="Unreadable records" value=${count(top.records_skipped)} exact=${top.records_skipped} tone="warn" />` : null}
      ${top.paused.length ? html`<${Figure} label="Paused partitions" value=${top.paused.join(", ")} tone="warn" />` : null}
    </dl>
  <//>`;
}

/** @param {{ run: string, tick: number, query: Record<string, string> }} props */
function CurvesPanel({ run, tick, query }) {
  const answer = useAnswer(address(run, "series", { learner: query.learner, points: 600 }), tick);
  const learners = /** @type {string[]} */ (answer.data?.learners ?? []);
  /** @param {Event} event */
  const chosen = (event) => replaceQuery({ learner: /** @type {HTMLSelectElement} */ (event.target).value });
  const choice =
    learners.length > 1
      ? html`<label>Learner <select value=${answer.data.learner ?? ""} onChange=${chosen}>
          ${learners.map((name) => html`<option value=${name}>${name}</option>`)}
        </select></label>`
      : null;
  return html`<${Panel} title="Curves" note="by learner step; drag to zoom, double-click to see all" actions=${choice}>
    ${shown(answer, (data) => html`<${CurvesOf} series=${data.series} query=${query} />`, "the curves")}
  <//>`;
}

/** @param {{ series: import("../contract").Series[], query: Record<string, string> }} props */
function CurvesOf({ series, query }) {
  const sides = useMemo(() => [{ name: "", series }], [series]);
  return html`<${Curves} sides=${sides} query=${query} />`;
}

/** @param {{ top: import("../contract").Top }} props */
function Staleness({ top }) {
  const lags = Object.entries(top.staleness).map(([lag, n]) => /** @type {[number, number]} */ ([Number(lag), n]));
  const all = lags.reduce((sum, [, n]) => sum + n, 0);
  lags.sort((a, b) => a[0] - b[0]);
  return html`<${Panel} title="Policy lag of trained rollouts" note="versions behind, oldest rollout of the batch">
    <${Table} caption="Rollouts trained on by policy lag" heads=${[{ text: "Lag", number: true }, { text: "Rollouts", number: true }, { text: "Share", number: true }, BAR]}
      rows=${lags.map(([lag, n]) => [count(lag), count(n), percent(n / all), html`<${Bar} share=${n / all} />`])}
      empty="No step has trained on a batch yet." />
  <//>`;
}

/** @param {{ top: import("../contract").Top }} props */
function Processes({ top }) {
  if (top.components.length === 0) {
    return html`<${Panel} title="Processes"><${Empty}>No worker, server or gateway has written metrics.<//><//>`;
  }
  const rows = top.components.map((each) => [
    each.component,
    each.role,
    versionText(each.values.policy_version),
    rate(each.values.rollouts_per_s ?? each.values.requests_per_s ?? each.values.calls_per_s),
    rate(each.values.tokens_per_s ?? each.values.completion_tokens_per_s),
    each.values.running === 0 ? "ended" : `${duration(each.age_s)} ago`,
  ]);
  return html`<${Panel} title="Processes">
    <${Table} caption="Processes that report" rows=${rows} keys=${top.components.map((each) => each.component)}
      heads=${["Name", "Role", "Version", { text: "Per second", number: true }, { text: "Tokens/s", number: true }, { text: "Reported", number: true }]} />
  <//>`;
}
