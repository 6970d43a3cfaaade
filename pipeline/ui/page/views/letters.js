// Dead letters: what could not be read, why, and sending some again.

import { html, useState } from "../vendor/preact-htm.js";
import { address, postJson } from "../lib/api.js";
import { bytes, count, time } from "../lib/format.js";
import { usePages } from "../lib/pages.js";
import { Confirm, Empty, Failure, More, Panel, shown, Table } from "../parts/basics.js";

/** @typedef {import("../contract").Letter} Letter */

/** @param {import("../app").ViewProps} props */
export function LettersView({ run, live }) {
  const [sent, setSent] = useState(0);
  const [chosen, setChosen] = useState(/** @type {string[]} */ ([]));
  const [asking, setAsking] = useState(false);
  const [busy, setBusy] = useState(false);
  const [outcome, setOutcome] = useState("");
  const [failure, setFailure] = useState(/** @type {Error | null} */ (null));
  /** @type {ReturnType<typeof usePages<Letter>>} */
  const pages = usePages((after) => address(run, "dead-letters", { after, limit: 100 }), live.tick + sent);
  const waiting = pages.rows.filter((each) => !each.redriven).map((each) => each.place);
  const selected = chosen.filter((place) => waiting.includes(place));

  const toggle = (/** @type {string} */ place) =>
    setChosen((before) => (before.includes(place) ? before.filter((each) => each !== place) : [...before, place]));
  const redrive = () => {
    setBusy(true);
    postJson(address(run, "dead-letters/redrive"), { places: selected })
      .then((answer) => {
        const left = Object.entries(answer.left ?? {}).map(([place, why]) => ` ${place} stays: ${why}.`);
        setOutcome(`${count(answer.redriven)} sent again.${left.join("")}`);
        setFailure(null);
        setChosen([]);
        setSent((n) => n + 1);
      }, setFailure)
      .finally(() => {
        setBusy(false);
        setAsking(false);
      });
  };
  const actions = html`
    <button type="button" disabled=${waiting.length === 0} onClick=${() => setChosen(selected.length === waiting.length ? [] : waiting)}>
      ${selected.length && selected.length === waiting.length ? "Choose none" : "Choose all shown"}
    </button>
    <button type="button" class="primary" disabled=${selected.length === 0} onClick=${() => setAsking(true)}>
      Send ${selected.length || ""} again
    </button>`;
  return html`<${Panel} title="Dead letters" note="records that could not be read as rollouts, kept byte for byte" actions=${pages.rows.length ? actions : null}>
    <p class="outcome" role="status" aria-live="polite">${outcome}</p>
    ${failure ? html`<${Failure} error=${failure} />` : null}
    ${shown(
      pages.first,
      (data) => (pages.rows.length === 0
        ? html`<${Empty}>No dead letters: every record could be read.<//>`
        : html`
          <${Table} caption="Dead letters" keys=${pages.rows.map((each) => each.place)}
            heads=${[{ text: "Chosen", quiet: true }, "Letter", "From", "Reason", "Time", { text: "Size", number: true }, "State", "Begins"]}
            rows=${pages.rows.map((each) => [
              each.redriven
                ? ""
                : html`<input type="checkbox" aria-label=${`choose ${each.place}`} checked=${selected.includes(each.place)} onChange=${() => toggle(each.place)} />`,
              html`<code>${each.place}</code>`,
              html`<code>${each.source}</code>`,
              html`<span class="text">${each.reason}</span>`,
              time(each.time_ms),
              bytes(each.bytes),
              each.redriven ? "sent again" : "waiting",
              html`<code class="preview">${each.preview}</code>`,
            ])} />
          ${pages.failure ? html`<${Failure} error=${pages.failure} again=${pages.more} />` : null}
          <${More} more=${pages.hasMore} busy=${pages.busy} onMore=${pages.more} shown=${pages.rows.length} total=${data.total} />`),
      "the dead letters",
    )}
    ${asking
      ? html`<${Confirm} title=${`Send ${selected.length} again?`} confirm="Send again" busy=${busy} onConfirm=${redrive} onCancel=${() => setAsking(false)}>
          <p>Their bytes go to the topic they came from, each once. What is still wrong with them makes them dead letters again.</p>
          <ul class="ranges">${selected.slice(0, 20).map((place) => html`<li><code>${place}</code></li>`)}</ul>
          ${selected.length > 20 ? html`<p class="muted">and ${selected.length - 20} more</p>` : null}
        <//>`
      : null}
  <//>`;
}
