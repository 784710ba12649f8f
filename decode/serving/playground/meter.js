/** Counts what a stream brings, for the figures and the charts. */

export class Meter {
  constructor() {
    this.started = performance.now();
    this.first = null; // seconds to the first token
    this.emitted = 0;
    this.accepted = 0;
    this.rejected = 0;
    this.rounds = [];
    this.stats = null; // the server's own count, once it has come
  }

  take({ tokens, round, stats }) {
    if (tokens.length) this.count(tokens, round ?? { drafted: 0, accepted: 0, variant: null, alpha: null });
    this.stats ??= stats;
  }

  count(tokens, round) {
    const prefill = this.emitted === 0 && !round.drafted;
    this.emitted += tokens.length;
    this.first ??= this.elapsed;
    if (prefill) return; // the prompt's own pass is no round
    this.accepted += round.accepted;
    this.rejected += Number(round.accepted < round.drafted);
    this.rounds.push({ ...round, acceptance: this.acceptance });
  }

  get elapsed() {
    return (performance.now() - this.started) / 1000;
  }

  /** Of the judged draft tokens, those accepted; null before the first was judged. */
  get acceptance() {
    const judged = this.accepted + this.rejected;
    return judged ? this.accepted / judged : null;
  }

  /** The server's figures, or before they have come, those seen from here. */
  figures() {
    if (this.stats) {
      const { acceptance_rate, tokens_per_step, ttft, seconds, emitted, accepted, rejected } = this.stats;
      return { acceptance: acceptance_rate, perStep: tokens_per_step, first: ttft, seconds, emitted, accepted,
        rejected };
    }
    const perStep = this.rounds.length ? (this.emitted - 1) / this.rounds.length : null;
    return { acceptance: this.acceptance, perStep, first: this.first, seconds: this.elapsed, emitted: this.emitted,
      accepted: this.accepted, rejected: this.rejected };
  }
}
