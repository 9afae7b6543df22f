// Numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes: "56 KiB". */
export function bytes(number) {
  const power = number < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(number) / 10));
  return `${short(number / 1024 ** power)} ${UNITS[power]}`;
}

/** Seconds: "4.2 ms", "1.3 s", "5 min". */
export function seconds(number) {
  if (number < 1) return `${short(number * 1000)} ms`;
  return number < 120 ? `${short(number)} s` : `${Math.round(number / 60)} min`;
}

/** Three digits at most: "0.42", "5.8", "391". */
export function short(number) {
  const digits = number >= 100 || Number.isInteger(number) ? 0 : number >= 10 ? 1 : 2;
  return Number(number.toFixed(digits)).toLocaleString("en");
}
