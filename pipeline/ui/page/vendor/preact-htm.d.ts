/** Types of the part of preact and htm that the page uses. */

export interface VNode {
  type: unknown;
  key: unknown;
}
export type Child = VNode | string | number | null | undefined | boolean | Child[];
export interface Ref<T> {
  current: T;
}
export type Cleanup = void | (() => void);

export function html(strings: TemplateStringsArray, ...values: unknown[]): VNode;
export function h(type: unknown, props: object | null, ...children: Child[]): VNode;
export function render(node: Child, parent: Element): void;
export function useState<T>(initial: T | (() => T)): [T, (next: T | ((before: T) => T)) => void];
export function useReducer<S>(reduce: (before: S) => S, initial: S): [S, () => void];
export function useEffect(effect: () => Cleanup, inputs?: readonly unknown[]): void;
export function useLayoutEffect(effect: () => Cleanup, inputs?: readonly unknown[]): void;
export function useRef<T>(initial: T): Ref<T>;
export function useMemo<T>(make: () => T, inputs: readonly unknown[]): T;
export function useCallback<F>(callback: F, inputs: readonly unknown[]): F;
export function useErrorBoundary(callback?: (error: Error) => void): [Error | undefined, () => void];
