package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

const (
	retention        = "retention"
	retentionWorkers = 16
	claimP50         = "claim p50"
	claimP99         = "claim p99"
	noCleaner        = "no cleaner"
	defaultCleaner   = "cleaner, default"
	gentleCleaner    = "cleaner, gentle"

	// expiredConsumer has the records that go.
	expiredConsumer = "expired"
)

// cleaners as their documentation says.
var cleaners = []struct {
	name      string
	batchSize int
	pause     time.Duration
}{
	{defaultCleaner, 0, 0},
	{gentleCleaner, 100, 20 * time.Millisecond},
}

// addRetention compares how long messages take while a cleaner deletes expired records with how long they take
// without one.
func (b *bench) addRetention(ctx context.Context) error {
	s := &section{name: retention, unit: " ms", title: fmt.Sprintf("Retention: latency of %s, %s, while a cleaner deletes up to %d expired records",
		workersSetting(retentionWorkers), inboxsqlFused.name, b.options.rows)}
	p, err := b.addPlace(ctx, "retention", true)
	if err != nil {
		return err
	}
	p50 := &group{setting: claimP50, before: func(ctx context.Context) error { return p.refill(ctx, b.admin, b.options.rows) }}
	p99 := &group{setting: claimP99}
	window := 10 * b.options.slice
	add := func(name string, baseline50, baseline99 *subject, beside func(context.Context) error) (*subject, *subject) {
		var last latencies // of the same round
		s50 := &subject{name: name, baseline: baseline50, rate: func(ctx context.Context) (_ float64, err error) {
			if last, err = measureLatencies(ctx, inboxsqlFused, p, retentionWorkers, randomIDs.next, window, beside); err != nil {
				return 0, err
			}
			return last.quantile(0.5), nil
		}}
		s99 := &subject{name: name, baseline: baseline99, rate: func(context.Context) (float64, error) { return last.quantile(0.99), nil }}
		p50.subjects, p99.subjects = append(p50.subjects, s50), append(p99.subjects, s99)
		return s50, s99
	}
	base50, base99 := add(noCleaner, nil, nil, func(context.Context) error { return nil })
	for _, c := range cleaners {
		var deleted int
		var took time.Duration
		add(c.name, base50, base99, func(ctx context.Context) error {
			began := time.Now()
			n, err := p.clean(ctx, inbox.CleanerOptions{BatchSize: c.batchSize, BatchPause: c.pause})
			deleted, took = deleted+n, took+time.Since(began)
			return err
		})
		s.notes = append(s.notes, func() string {
			if deleted == 0 {
				return ""
			}
			return fmt.Sprintf("%s: %.0f records/s deleted, a million in %.0f s", c.name, float64(deleted)/took.Seconds(), 1e6*took.Seconds()/float64(deleted))
		})
	}
	s.groups = []*group{p50, p99}
	if b.wanted(s) {
		b.sections = append(b.sections, s)
	}
	return nil
}

// clean makes a pass, as far as it comes until the context ends.
func (p *place) clean(ctx context.Context, options inbox.CleanerOptions) (deleted int, err error) {
	db, err := sql.Open("postgres", p.url)
	if err != nil {
		return 0, err
	}
	defer db.Close()
	repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		return 0, err
	}
	options.Consumers = inbox.AllConsumers()
	options.Retention = inbox.Retention{Default: inbox.KeepForever, Consumers: map[string]time.Duration{expiredConsumer: time.Hour}}
	cleaner, err := inbox.NewCleaner(repository, options)
	if err != nil {
		return 0, err
	}
	pass, err := cleaner.Pass(ctx)
	if ctx.Err() != nil {
		err = nil // the window is over
	}
	return pass.Deleted, err
}

// refill makes so many expired records again, all together.
func (p *place) refill(ctx context.Context, admin *sql.DB, rows int) error {
	var left int64
	if err := admin.QueryRowContext(ctx, fmt.Sprintf(`SELECT count(*) FROM %q.watermill_inbox WHERE consumer = '%s'`, p.schema, expiredConsumer)).Scan(&left); err != nil {
		return err
	}
	if left >= int64(rows)/2 {
		return nil
	}
	_, err := admin.ExecContext(ctx, fmt.Sprintf(`INSERT INTO %q.watermill_inbox (consumer, message_id, processed_at)
		SELECT '%s', gen_random_uuid()::text, now() - interval '1 day' + n * interval '1 microsecond' FROM generate_series(1, %d) AS n`,
		p.schema, expiredConsumer, int64(rows)-left))
	if err != nil {
		return err
	}
	_, err = admin.ExecContext(ctx, fmt.Sprintf(`VACUUM (ANALYZE) %q.watermill_inbox`, p.schema))
	return err
}
