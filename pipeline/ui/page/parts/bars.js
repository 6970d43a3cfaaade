// Bars of counts as SVG: over time or over bins. The numbers stand beside them or in a table.

import { html } from "../vendor/preact-htm.js";

/**
 * @param {{ counts: number[], most?: number, height?: number, label: string, titles?: (i: number) => string }} props
 */
export function Bars({ counts, most, height = 34, label, titles }) {
  const top = most ?? Math.max(1, ...counts);
  const width = 100;
  const step = width / Math.max(1, counts.length);
  return html`<svg class="bars" viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img" aria-label=${label} height=${height}>
    <line x1="0" x2=${width} y1=${height - 0.5} y2=${height - 0.5} class="bars-base" vector-effect="non-scaling-stroke" />
    ${counts.map((value, i) => {
      if (!value) return null;
      const size = Math.max(1.5, ((height - 1) * value) / top);
      return html`<rect key=${i} x=${i * step + step * 0.08} width=${step * 0.84} y=${height - 1 - size} height=${size}>
        ${titles ? html`<title>${titles(i)}</title>` : null}
      </rect>`;
    })}
  </svg>`;
}
