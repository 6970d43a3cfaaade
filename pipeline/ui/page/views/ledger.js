// The ledger: every record of rollouts in one place. Each number opens to the offsets behind it, and they to rollouts.

import { html, useEffect, useState } from "../vendor/preact-htm.js";
import { address } from "../lib/api.js";
import { useAnswer } from "../lib/data.js";
import { duration, percent, plain, time, whole, words } from "../lib/format.js";
import { usePages } from "../lib/pages.js";
import { link, replaceQuery } from "../lib/route.js";
import { Bar, Empty, Failure, FATE_SIGNS, Loading, More, Panel, shown, Table } from "../parts/basics.js";

/** @typedef {import("../contract").Ledger} Ledger */
/** @typedef {{ fate: string, reason?: string, label: string, n: number, within?: boolean }} Place */

const ASK_AGAIN_MS = 1000;

/** @param {import("../app").ViewProps} props */
export function LedgerView({ run, live, query }) {
  const [asked, setAsked] = useState(0);
  /** @type {import("../lib/data").Answer<import("../contract").LedgerAnswer>} */
  const answer = useAnswer(address(run, "ledger"), live.tick + asked);
  const again = () => setAsked((n) => n + 1);
  useEffect(() => {
    // A finished run has no more ticks, but its proof begins with the first request and takes a while.
    if (!answer.data?.running) return undefined;
    const timer = setTimeout(again, ASK_AGAIN_MS);
    return () => clearTimeout(timer);
  }, [answer.data]);
  return shown(
    answer,
    (data) => html`
      ${data.problem ? html`<${Failure} error=${new Error(data.problem)} again=${again} />` : null}
      ${data.ledger
        ? html`<${Book} run=${run} ledger=${data.ledger} answer=${data} query=${query} again=${again} />`
        : data.problem ? null : html`<${Loading} what="every topic of the run, once" />`}`,
    "the ledger",
  );
}

/** @param {{ run: string, ledger: Ledger, answer: import("../contract").LedgerAnswer, query: Record<string, string>, again: () => void }} props */
function Book({ run, ledger, answer, query, again }) {
  const places = placesOf(ledger);
  const verdict = ledger.balanced ? "Balanced" : "Not balanced";
  const note = `as of ${time(answer.at_ms)}, read in ${duration(answer.seconds)}${answer.running ? ", to be read again" : ""}`;
  return html`
    <${Panel} title="Ledger" note=${note} actions=${html`<button type="button" onClick=${again}>Read again</button>`}>
      <p class=${`verdict ${ledger.balanced ? "good" : "bad"}`}>
        <span aria-hidden="true">${ledger.balanced ? "✓" : "✗"}</span> <strong>${verdict}.</strong>
        ${ledger.balanced
          ? ` Every one of ${whole(ledger.produced)} records is in exactly one place.`
          : " The places of the records do not add up; the problems are below."}
      </p>
      <${Places} run=${run} places=${places} produced=${ledger.produced} query=${query} />
    <//>
    <${Notes} title="Problems" lines=${ledger.problems} />
    <${Notes} title="Undecided: hidden by open transactions" lines=${ledger.undecided} />
    <${Notes} title="Unreadable records" lines=${ledger.unreadable} />
    <div class="columns">
      <${Learners} ledger=${ledger} />
      <${Environments} ledger=${ledger} run=${run} />
    </div>
    <${Others} ledger=${ledger} />`;
}

/**
 * @param {Ledger} ledger
 * @returns {Place[]}
 */
function placesOf(ledger) {
  const untouched = ledger.batched - ledger.trained - ledger.skipped;
  return [
    { fate: "batched", label: "batched", n: ledger.batched },
    { fate: "trained", label: "trained on", n: ledger.trained, within: true },
    { fate: "skipped", label: "skipped by a learner", n: ledger.skipped, within: true },
    ...(untouched > 0 ? [{ fate: "waiting", label: "waiting for a step", n: untouched, within: true }] : []),
    ...Object.entries(ledger.dropped).map(([reason, n]) => ({ fate: "dropped", reason, label: `dropped: ${words(reason)}`, n })),
    { fate: "dead_lettered", label: "dead-lettered", n: ledger.dead_lettered },
    { fate: "control", label: "control", n: ledger.control },
    { fate: "in_flight", label: "in flight", n: ledger.in_flight },
    { fate: "unread", label: "not yet read", n: ledger.unread },
  ];
}

/** @param {{ run: string, places: Place[], produced: number, query: Record<string, string> }} props */
function Places({ run, places, produced, query }) {
  const sum = places.filter((each) => !each.within).reduce((all, each) => all + each.n, 0);
  return html`<div class="table-box" tabindex="0" role="region" aria-label="Places of all records">
    <table class="places">
      <caption class="hidden">Places of all records</caption>
      <thead><tr><th scope="col">Place</th><th scope="col" class="n">Records</th><th scope="col" class="n">Share</th><th scope="col" class="wide-only"><span class="hidden">Share as a bar</span></th></tr></thead>
      ${places.map((each) => {
        const id = each.reason ? `${each.fate}:${each.reason}` : each.fate;
        const open = query.open === id;
        return html`<tbody key=${id}>
          <tr class=${each.within ? "within" : ""}>
            <th scope="row"><span class="sign" aria-hidden="true">${FATE_SIGNS[each.fate] ?? "◌"}</span> ${each.label}</th>
            <td class="n">
              ${each.n > 0 && each.within && each.fate !== "waiting"
                ? html`<a href=${link(run, "rollouts", { fate: each.fate })}>${whole(each.n)}</a>`
                : each.n > 0 && !each.within
                ? html`<button type="button" class="number" aria-expanded=${open} onClick=${() => replaceQuery({ open: open ? "" : id })}>
                    ${whole(each.n)}<span class="hidden">: the offsets of ${each.label}</span></button>`
                : whole(each.n)}
            </td>
            <td class="n">${percent(produced ? each.n / produced : 0)}</td>
            <td class="wide-only"><${Bar} share=${produced ? each.n / produced : 0} tone=${each.within ? "soft" : ""} /></td>
          </tr>
          ${open ? html`<tr><td colspan="4"><${Offsets} run=${run} place=${each} /></td></tr>` : null}
        </tbody>`;
      })}
      <tfoot><tr><th scope="row">all places</th><td class="n">${whole(sum)}</td><td class="n">${sum === produced ? "= produced" : `≠ ${whole(produced)} produced`}</td><td class="wide-only"></td></tr></tfoot>
    </table>
  </div>`;
}

/** @param {{ run: string, place: Place }} props */
function Offsets({ run, place }) {
  /** @type {ReturnType<typeof usePages<string>>} */
  const pages = usePages(
    (after) => address(run, "ledger/offsets", { fate: place.fate, reason: place.reason, after, limit: 60 }),
    0,
    (answer) => answer.ranges,
  );
  // In the ledger a batched rollout stays batched when a step trains on it or skips it; in the list it has the later fate.
  const fate = place.fate === "batched" ? "batched,trained,skipped" : place.fate;
  const listed = ["control", "dead_lettered"].includes(place.fate) ? null : { fate, reason: place.reason };
  return html`<div class="offsets">
    ${shown(
      pages.first,
      (data) => html`
        ${pages.rows.length === 0 ? html`<${Empty}>No offsets are known.<//>` : null}
        <ul class="ranges">
          ${pages.rows.map((range) => html`<li key=${range}><a href=${link(run, "rollouts", { ...listed, open: firstOf(range) })}>${range}</a></li>`)}
        </ul>
        ${pages.failure ? html`<${Failure} error=${pages.failure} again=${pages.more} />` : null}
        <${More} more=${pages.hasMore} busy=${pages.busy} onMore=${pages.more} shown=${pages.rows.length} />
        <p class="muted">${whole(data.total)} ${data.total === 1 ? "record" : "records"}, as ranges PARTITION:FIRST-LAST.
          ${listed ? html` <a href=${link(run, "rollouts", listed)}>List these rollouts</a>` : null}
          ${place.fate === "dead_lettered" ? html` <a href=${link(run, "letters")}>List the dead letters</a>` : null}</p>`,
      "the offsets",
    )}
  </div>`;
}

/** @param {string} range */
function firstOf(range) {
  return range.replace(/-\d+$/, "");
}

/** @param {{ title: string, lines: string[] }} props */
function Notes({ title, lines }) {
  if (!lines?.length) return null;
  return html`<${Panel} title=${title}><ul class="notes">${lines.map((line) => html`<li>${line}</li>`)}</ul><//>`;
}

/** @param {{ ledger: Ledger }} props */
function Learners({ ledger }) {
  const learners = Object.entries(ledger.learners ?? {});
  const names = [...new Set(learners.flatMap(([, facts]) => Object.keys(facts)))].filter((name) =>
    learners.some(([, facts]) => typeof facts[name] !== "object" && facts[name] !== ""),
  );
  return html`<${Panel} title="Learners">
    <${Table} caption="Learners on record" empty="No learner has made a step." heads=${["Learner", ...names.map((name) => ({ text: words(name), number: true }))]}
      rows=${learners.map(([learner, facts]) => [learner, ...names.map((name) => plain(facts[name]))])} />
  <//>`;
}

/** @param {{ ledger: Ledger, run: string }} props */
function Environments({ ledger, run }) {
  const environments = Object.entries(ledger.environments ?? {});
  const rows = environments.map(([name, counts]) => {
    const records = counts.records ?? {};
    const dropped = Object.entries(records).filter(([fate]) => fate.startsWith("dropped")).reduce((sum, [, n]) => sum + n, 0);
    return [
      name ? html`<a href=${link(run, "rollouts", { environment: name })}>${name}</a>` : "(none named)",
      whole(records.produced),
      whole(records.batched ?? 0),
      whole(dropped),
      whole(counts.tokens?.batched),
    ];
  });
  return html`<${Panel} title="Environments">
    <${Table} caption="Records by environment" empty="No environment yet."
      heads=${["Environment", { text: "Read", number: true }, { text: "Batched", number: true }, { text: "Dropped", number: true }, { text: "Tokens batched", number: true }]} rows=${rows} />
  <//>`;
}

/** @param {{ ledger: Ledger }} props */
function Others({ ledger }) {
  const items = /** @type {[string, unknown][]} */ ([
    ["rollouts among the records", whole(ledger.rollouts)],
    ["batches", whole(ledger.batches)],
    ["steps", whole(ledger.steps)],
    ["rollouts for evaluation", whole(ledger.evals)],
    ["known by counts alone (pruned)", whole(ledger.pruned)],
    ["records skipped as unreadable", whole(ledger.records_skipped)],
    ...Object.entries(ledger.skipped_as ?? {}).map(([reason, n]) => [`skipped by learners: ${words(reason)}`, whole(n)]),
    ...Object.entries(ledger.calls ?? {}).filter(([, n]) => typeof n === "number").map(([fate, n]) => [`model calls ${words(fate)}`, whole(Number(n))]),
  ]);
  return html`<${Panel} title="What else was counted">
    <${Table} caption="Other counts" heads=${["Count", { text: "Number", number: true }]} rows=${items} />
  <//>`;
}
