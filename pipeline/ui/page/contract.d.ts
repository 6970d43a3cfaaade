/** The answers of the server, as docs/page.md has them. Times are milliseconds since the Unix epoch. */

export interface RunEntry {
  run: string;
  source: "topics" | "archive";
  learners: string[];
}

export interface ChangedSetting {
  key: string;
  value: string;
  default: string;
}

export interface Settings {
  known: boolean;
  changed: ChangedSetting[];
}

export interface Component {
  component: string;
  role: string;
  timestamp: number;
  age_s: number;
  values: Record<string, number>;
  components: number;
}

export interface Top {
  run: string;
  seconds: number;
  quiet_s: number;
  quiet: boolean;
  produced: number;
  rollouts: number;
  batched: number;
  batches: number;
  trained: number;
  skipped: number;
  dropped: Record<string, number>;
  dead_lettered: number;
  control: number;
  in_flight: number;
  unread: number;
  waiting: number;
  step: number;
  policy_version: number;
  policy_age_s: number;
  sampled_version: number;
  rollouts_per_s: number;
  read_per_s: number;
  batches_per_s: number;
  steps_per_s: number;
  policies_per_s: number;
  reward: number;
  success: number;
  rewards: number[];
  successes: number[];
  staleness: Record<string, number>;
  records_skipped: number;
  history: number;
  history_left: number;
  paused: number[];
  stalled_stage: string;
  stalled: string;
  configuration: Configuration | null;
  components: Component[];
}

export interface Configuration {
  generation: number;
  estimator: string | null;
  mark_keys: number | null;
  changed: Record<string, unknown[]> | null;
}

export interface Overview {
  top: Top;
  indexed: { offset_total: number; offset_done: number };
  live: boolean;
  commands: boolean;
  problem?: string | null;
}

export interface Changed {
  rollouts: number;
  steps: number;
  versions: number;
  dead_letters: number;
  sessions: number;
}

export interface Series {
  name: string;
  group: string;
  x: number[];
  y: (number | null)[];
}

export interface SeriesAnswer {
  learner: string | null;
  learners: string[];
  series: Series[];
}

export interface Evaluated {
  version: number;
  step: number | null;
  phase: string;
  name: string;
  /** Those of a suite. */
  environments: string[] | null;
  samples: number;
  answers: number;
  expected: number;
  figures: Record<string, { mean: number; low: number; high: number }>;
}

export interface Evaluations {
  rows: Evaluated[];
  versions: number;
}

export type Fate =
  | "in_flight"
  | "unread"
  | "batched"
  | "trained"
  | "skipped"
  | "dropped"
  | "dead_lettered"
  | "control";

export interface Row {
  place: string;
  time_ms: number;
  uid: string;
  environment: string;
  example: string;
  version: number;
  lowest_version: number;
  highest_version: number;
  worker: string;
  reward: number | null;
  length: number;
  sampled: number;
  truncated: boolean;
  fate: Fate;
  reason: string | null;
  batch: string | null;
  step: number | null;
  advantage: number | null;
  group: string;
  preview: string;
}

export interface Page<T> {
  rows: T[];
  next: string | null;
  matching?: number;
  matching_exact?: boolean;
  total?: number;
}

export interface Facets {
  environments: string[];
  workers: string[];
  versions: { lowest: number | null; highest: number | null };
  fates: Record<string, number>;
  reasons: Record<string, number>;
}

export interface Turn {
  role: string;
  text: string;
  start: number;
  stop: number;
  reward: number | null;
  model_version: string | number | null;
  sampling: Record<string, unknown> | null;
  has_logprobs: boolean;
}

export interface Tokens {
  ids: number[];
  texts: string[] | null;
  mask: number[];
  logprobs: (number | null)[];
  advantages: (number | null)[];
  ratios: (number | null)[];
  versions: (number | null)[];
  token_rewards: (number | null)[];
  total: number;
  from: number;
}

export interface TreeNode {
  kind?: string;
  name?: string;
  text?: string;
  children?: TreeNode[];
  [key: string]: unknown;
}

export interface Medium {
  number: number;
  text: string;
  digest: string;
  start: number;
}

export interface RolloutAnswer {
  row: Row;
  turns: Turn[];
  media: Medium[];
  tokens: Tokens;
  components: Record<string, number>;
  sampling: Record<string, unknown>;
  extra: Record<string, unknown>;
  arrays: Record<string, string>;
  group: Row[];
  fate: TreeNode;
  lineage: TreeNode[];
}

export interface Estimator {
  name: string;
  advantage: number | null;
  group: { uid: string; advantage: number | null }[];
}

export interface Group {
  group: string;
  environment: string;
  example: string;
  version: number;
  size: number;
  mean: number | null;
  std: number | null;
  min: number | null;
  max: number | null;
  zero_variance: boolean;
  fate: string;
  time_ms: number;
  members: string[];
}

export interface Spread {
  versions: number[];
  zero_variance_share: (number | null)[];
  histogram: { edges: number[]; counts: number[] };
  by_environment: Record<string, { groups: number; zero_variance: number }>;
}

export interface Drops {
  edges_ms: number[];
  reasons: Record<string, number[]>;
  totals: Record<string, number>;
}

export interface Version {
  version: number;
  learner: string;
  step: number;
  kind: string;
  bytes: number;
  created_ms: number;
  digest: string;
  seconds: number | null;
}

export interface Weights {
  versions: Version[];
  serving: Record<string, number>;
}

export interface Ledger {
  balanced: boolean;
  produced: number;
  rollouts: number;
  batched: number;
  batches: number;
  trained: number;
  skipped: number;
  skipped_as: Record<string, number>;
  dropped: Record<string, number>;
  dead_lettered: number;
  control: number;
  in_flight: number;
  unread: number;
  steps: number;
  evals: number;
  pruned: number;
  tokens: Record<string, number>;
  learners: Record<string, Record<string, unknown>>;
  environments: Record<string, { records?: Record<string, number>; tokens?: Record<string, number> }>;
  calls: Record<string, unknown>;
  records_skipped: number;
  unreadable: string[];
  undecided: string[];
  problems: string[];
}

export interface LedgerAnswer {
  ledger: Ledger | null;
  at_ms: number | null;
  seconds: number | null;
  running: boolean;
  problem: string | null;
}

export interface Offsets {
  ranges: string[];
  next: string | null;
  total: number;
}

export interface Session {
  session: string;
  environment: string;
  state: string;
  calls: number;
  rollouts: number;
  began_ms: number | null;
  ended_ms: number | null;
  reason: string | null;
}

export interface SessionAnswer {
  session: Session;
  events: Record<string, unknown>[];
  calls: {
    place: string;
    messages: { role?: string; content?: unknown }[];
    answer: unknown;
    tokens: number;
    version: number | string | null;
    began_ms: number | null;
    answered_ms: number | null;
  }[];
}

export interface Letter {
  place: string;
  source: string;
  reason: string;
  time_ms: number;
  bytes: number;
  redriven: boolean;
  preview: string;
}

export interface Mixture {
  workers: {
    worker: string;
    environments: {
      environment: string;
      weight: number | null;
      drawn: number | null;
      success: number | null;
      unlocked: boolean | null;
      /** Prompts of the worker by the success of their last group; null if prompts have no pools. */
      pools: { easy: number; hard: number; other: number } | null;
    }[];
  }[];
}
