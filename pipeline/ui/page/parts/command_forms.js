// The commands of the page: what each asks for, and the body that is sent.

/** @typedef {{ name: string, label: string, number?: boolean, optional?: boolean, choices?: string[], hint?: string }} Field */
/** @typedef {{ name: string, title: string, note: string, fields: Field[], body: (values: Record<string, string>) => object }} Form */

/** @type {Form[]} */
export const COMMANDS = [
  {
    name: "scale",
    title: "Scale",
    note: "Change the number of processes of a role. Without a number the settings decide again.",
    fields: [
      { name: "role", label: "Role", choices: ["env", "group", "infer", "gateway", "eval"] },
      { name: "processes", label: "Processes", number: true, optional: true, hint: "as in the settings" },
    ],
    body: ({ role, processes }) => ({ processes: { [role]: processes === "" ? null : Number(processes) } }),
  },
  {
    name: "pause_environment",
    title: "Pause an environment",
    note: "Workers begin no more groups of it. Groups that began are finished.",
    fields: [
      { name: "environment", label: "Environment" },
      { name: "reason", label: "Reason", hint: "its verifier hangs" },
    ],
    body: ({ environment, reason }) => ({ environment, reason }),
  },
  {
    name: "resume_environment",
    title: "Resume an environment",
    note: "Workers begin groups of it again.",
    fields: [{ name: "environment", label: "Environment" }],
    body: ({ environment }) => ({ environment }),
  },
  {
    name: "weigh",
    title: "Weigh an environment",
    note: "Change how often workers draw it. Without a weight the settings decide again.",
    fields: [
      { name: "environment", label: "Environment" },
      { name: "weight", label: "Weight", number: true, optional: true, hint: "as in the settings" },
    ],
    body: ({ environment, weight }) => ({ weights: { [environment]: weight === "" ? null : Number(weight) } }),
  },
  {
    name: "stop",
    title: "Stop after a step",
    note: "Learners end after this step, and the run with them. Without a number what was asked before is withdrawn.",
    fields: [{ name: "at_step", label: "Step", number: true, optional: true, hint: "withdrawn" }],
    body: ({ at_step }) => ({ at_step: at_step === "" ? null : Number(at_step) }),
  },
  {
    name: "drain",
    title: "Drain",
    note: "Nothing begins any more; what is complete is trained on, and the run ends with nothing in flight. It may be withdrawn.",
    fields: [{ name: "wanted", label: "Drain", choices: ["wanted", "withdrawn"] }],
    body: ({ wanted }) => ({ wanted: wanted === "wanted" }),
  },
  {
    name: "rollback",
    title: "Roll back weights",
    note: "Publish the parameters of an earlier policy version again, as the next version. Take over from a learner that runs: it ends.",
    fields: [
      { name: "version", label: "Version", number: true },
      { name: "reason", label: "Reason", hint: "reward hacking" },
      { name: "take_over", label: "A learner that publishes", choices: ["refuses the rollback", "is taken over from"] },
    ],
    body: ({ version, reason, take_over }) => ({ version: Number(version), reason, take_over: take_over === "is taken over from" }),
  },
  {
    name: "exclude",
    title: "Exclude rollouts",
    note: "Their groups are dropped, and learners leave out the batches that hold some. It is not withdrawn.",
    fields: [
      { name: "environments", label: "Environments", optional: true, hint: "math, sort" },
      { name: "workers", label: "Workers", optional: true, hint: "env-3" },
      { name: "offsets", label: "Offsets", optional: true, hint: "0:5-9" },
    ],
    body: ({ environments, workers, offsets }) => ({ environments: several(environments), workers: several(workers), offsets: several(offsets) }),
  },
  {
    name: "evaluate",
    title: "Evaluate now",
    note: "The evaluators of the run evaluate the newest policy version, also if it is not due.",
    fields: [],
    body: () => ({}),
  },
];

/** @param {string} text */
function several(text) {
  return text.split(",").map((each) => each.trim()).filter(Boolean);
}

/**
 * @param {Form} form
 * @param {Record<string, string>} values
 */
export function bodyOf(form, values) {
  return { command: form.name, ...form.body(values) };
}
