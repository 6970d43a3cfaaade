// The page: its frame, the run and view that the address names, the state of the connection.

import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./vendor/preact-htm.js";
import { useAnswer } from "./lib/data.js";
import { count, percent } from "./lib/format.js";
import { useLive } from "./lib/live.js";
import { link, useRoute } from "./lib/route.js";
import { restoreTheme, toggleTheme, useTheme } from "./lib/theme.js";
import { Empty, Failure, Loading, Panel } from "./parts/basics.js";
import { CommandsView } from "./views/commands.js";
import { CompareView } from "./views/compare.js";
import { DropsView } from "./views/drops.js";
import { GroupsView } from "./views/groups.js";
import { LedgerView } from "./views/ledger.js";
import { LettersView } from "./views/letters.js";
import { RolloutsView } from "./views/rollouts.js";
import { RunView } from "./views/run.js";
import { SessionsView } from "./views/sessions.js";
import { WeightsView } from "./views/weights.js";

/** @typedef {import("./lib/live").Live} Live */
/** @typedef {{ run: string, runs: import("./contract").RunEntry[], query: Record<string, string>, live: Live, name: string }} ViewProps */

/** Views that an archive has no answer for, and the command that has one once the archive is restored. */
const OF_TOPICS = /** @type {Record<string, string>} */ ({
  ledger: "rollstream ledger",
  sessions: "this view",
  letters: "rollstream dlq ls",
  commands: "this view",
});

const VIEWS = /** @type {Record<string, { title: string, view: (props: ViewProps) => unknown }>} */ ({
  run: { title: "Run", view: RunView },
  rollouts: { title: "Rollouts", view: RolloutsView },
  groups: { title: "Groups", view: GroupsView },
  drops: { title: "Drops", view: DropsView },
  weights: { title: "Weights", view: WeightsView },
  ledger: { title: "Ledger", view: LedgerView },
  sessions: { title: "Sessions", view: SessionsView },
  letters: { title: "Dead letters", view: LettersView },
  compare: { title: "Compare", view: CompareView },
  commands: { title: "Commands", view: CommandsView },
});

function App() {
  const route = useRoute();
  const list = useAnswer("api/runs");
  const runs = /** @type {import("./contract").RunEntry[]} */ (list.data?.runs ?? []);
  const run = route.run || (runs.length === 1 ? runs[0].run : "");
  const live = useLive(run);
  const view = route.view in VIEWS ? route.view : "run";
  const title = run ? VIEWS[view].title : "Runs";

  useEffect(() => {
    if (live.connection === "open" && list.error) list.again();
  }, [live.connection]);
  useEffect(() => {
    if (!list.error) return undefined;
    const retry = setTimeout(list.again, 2000);
    return () => clearTimeout(retry);
  }, [list.error]);
  useEffect(() => {
    document.title = run ? `${title} · ${run} · rollstream` : "rollstream";
  }, [run, title]);
  useFocusOnChange(`${run}/${view}`);

  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="bar-top">
      <a class="brand" href="#/" aria-label="rollstream, all runs"><${Mark} /> rollstream</a>
      ${run ? html`<${RunChoice} run=${run} runs=${runs} view=${view} />` : null}
      <span class="spacer"></span>
      ${run ? html`<${State} live=${live} />` : null}
      <${ThemeToggle} />
    </header>
    ${run ? html`<${Nav} run=${run} view=${view} live=${live} />` : null}
    <main id="main" tabindex="-1" class=${run ? "" : "alone"}>
      <h1 class=${run ? "hidden" : ""}>${run ? `${title} of ${run}` : "Runs"}</h1>
      ${run ? html`<${Banner} live=${live} />` : null}
      ${run
        ? html`<${Guarded} key=${`${run}/${view}`} view=${viewOf(view, run, runs)} name=${view} run=${run} runs=${runs} query=${route.query} live=${live} />`
        : html`<${RunList} runs=${runs} list=${list} />`}
    </main>`;
}

/**
 * @param {string} view
 * @param {string} run
 * @param {import("./contract").RunEntry[]} runs
 */
function viewOf(view, run, runs) {
  const source = runs.find((each) => each.run === run)?.source;
  if (runs.length && !source) return AbsentRun;
  if (!(view in OF_TOPICS)) return VIEWS[view].view;
  return source === "archive" ? NotInArchive : source ? VIEWS[view].view : RunsUnknown;
}

/** @param {ViewProps} props */
function AbsentRun({ run, runs }) {
  const names = runs.map((each) => html` <a href=${link(each.run, "run")}>${each.run}</a>`);
  return html`<${Panel} title="No such run"><${Empty}>This server has no run ${run}. It has:${names}<//><//>`;
}

function RunsUnknown() {
  return html`<${Loading} what="the runs" />`;
}

/** @param {ViewProps} props */
function NotInArchive({ name }) {
  return html`<${Panel} title=${VIEWS[name].title}><${Empty}>This is an archive, which has none: after rollstream restore, ${OF_TOPICS[name]} shows it.<//><//>`;
}

/** @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

/** @param {ViewProps & { view: (props: ViewProps) => unknown }} props */
function Guarded({ view, ...props }) {
  const [error, reset] = useErrorBoundary((failure) => console.error(failure));
  if (error) return html`<${Failure} error=${error} again=${reset} />`;
  return html`<${view} ...${props} />`;
}

/**
 * After a change of the view the keyboard and the screen reader begin at its content.
 * @param {string} place
 */
function useFocusOnChange(place) {
  const first = useRef(true);
  useEffect(() => {
    if (!first.current) {
      document.getElementById("main")?.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    first.current = false;
  }, [place]);
}

function Mark() {
  return html`<svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true" class="mark">
    <rect width="16" height="16" rx="3" /><path d="M3 5h7l3 3-3 3H3" />
  </svg>`;
}

/** @param {{ run: string, runs: import("./contract").RunEntry[], view: string }} props */
function RunChoice({ run, runs, view }) {
  if (runs.length < 2) return html`<span class="run-name" title=${run}>${run}</span>`;
  /** @param {Event} event */
  const chosen = (event) => {
    location.hash = link(/** @type {HTMLSelectElement} */ (event.target).value, view);
  };
  return html`<label class="run-choice"><span class="hidden">Run</span>
    <select value=${run} onChange=${chosen}>
      ${runs.some((each) => each.run === run) ? null : html`<option value=${run}>${run}</option>`}
      ${runs.map((each) => html`<option value=${each.run}>${each.run}${each.source === "archive" ? " (archive)" : ""}</option>`)}
    </select>
  </label>`;
}

/** @param {{ run: string, view: string, live: Live }} props */
function Nav({ run, view, live }) {
  const [open, setOpen] = useState(false);
  useEffect(() => setOpen(false), [view]);
  const top = live.overview?.top;
  const notes = /** @type {Record<string, string>} */ ({
    letters: top?.dead_lettered ? count(top.dead_lettered) : "",
    rollouts: top?.rollouts ? count(top.rollouts) : "",
  });
  const names = Object.keys(VIEWS).filter((name) => name !== "commands" || live.overview?.commands);
  return html`<nav aria-label="Views" class=${open ? "open" : ""}>
    <button type="button" class="nav-toggle" aria-expanded=${open} aria-controls="views" onClick=${() => setOpen(!open)}>
      <span>${VIEWS[view].title}</span><span aria-hidden="true">${open ? "▴" : "▾"}</span><span class="hidden">, choose a view</span>
    </button>
    <ul id="views">
      ${names.map(
        (name) => html`<li key=${name}>
          <a href=${link(run, name)} aria-current=${name === view ? "page" : undefined}>
            <span>${VIEWS[name].title}</span>${notes[name] ? html`<span class="nav-note">${notes[name]}</span>` : null}
          </a>
        </li>`,
      )}
    </ul>
  </nav>`;
}

/** @param {{ live: Live }} props */
function State({ live }) {
  const { connection, overview } = live;
  const [tone, text] =
    connection === "lost"
      ? ["bad", "Connection lost, retrying"]
      : connection === "refused"
        ? ["bad", "Refused by the server"]
        : connection === "connecting" || !overview
          ? ["wait", "Connecting"]
          : overview.live
            ? ["good", "Live"]
            : ["quiet", "Quiet"];
  return html`<span class=${`state ${tone}`} role="status" aria-live="polite">
    <span class="dot" aria-hidden="true"></span><span>${text}</span>
  </span>`;
}

function ThemeToggle() {
  const theme = useTheme();
  return html`<button type="button" class="icon" onClick=${toggleTheme} aria-label=${`Change to the ${theme === "dark" ? "light" : "dark"} theme`}>
    <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><circle cx="8" cy="8" r="6.2" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M8 1.8a6.2 6.2 0 0 1 0 12.4z" fill="currentColor" /></svg>
  </button>`;
}

/**
 * What stands above every view: a connection that is lost or refused, an error of the run, the progress of the index.
 * @param {{ live: Live }} props
 */
function Banner({ live }) {
  const { overview, connection, error } = live;
  if (connection === "refused" && error) return html`<${Failure} error=${error} />`;
  if (!overview) {
    if (connection === "lost") return html`<p class="banner bad" role="alert">The server does not answer; asking again.</p>`;
    return error ? html`<${Failure} error=${error} />` : null;
  }
  const { offset_done: done, offset_total: total } = overview.indexed;
  const share = total > 0 ? done / total : 1;
  // The index of a run that goes on is always a little behind.
  const behind = total - done > Math.max(2000, 0.05 * total);
  return html`
    ${connection === "lost"
      ? html`<p class="banner bad" role="alert">Connection lost, retrying. What is shown is from before.</p>`
      : null}
    ${overview.problem
      ? html`<div class="banner bad" role="alert">The run cannot be read at the moment; it is asked again, and what is shown is from before.
          <details><summary>The error</summary>${overview.problem}</details></div>`
      : null}
    ${behind
      ? html`<p class="banner"><label>Reading the run: ${count(done)} of ${count(total)} offsets
          <progress max="1" value=${share}>${percent(share)}</progress></label></p>`
      : null}`;
}

/** @param {{ runs: import("./contract").RunEntry[], list: import("./lib/data").Answer<unknown> }} props */
function RunList({ runs, list }) {
  if (list.error) return html`<${Failure} error=${list.error} again=${list.again} />`;
  if (list.loading) return html`<${Loading} what="the runs" />`;
  if (runs.length === 0) return html`<p class="empty">This server has no runs. Start it with <code>rollstream ui --run NAME</code>.</p>`;
  return html`<ul class="runs">
    ${runs.map(
      (each) => html`<li key=${each.run}>
        <a href=${link(each.run)}>${each.run}</a>
        <span class="muted">${each.source === "archive" ? "an archive" : "topics"}${each.learners.length ? `, learners ${each.learners.join(", ")}` : ""}</span>
      </li>`,
    )}
  </ul>`;
}

restoreTheme();
render(html`<${App} />`, /** @type {Element} */ (document.getElementById("page")));
