package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/partitions"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

const (
	partitioned      = "partitioned"
	plainTable       = "plain table"
	partitionedTable = "partitioned table"

	retirement   = "retirement"
	longestClaim = "longest message"
	noRetirement = "nothing is retired"
	retiring     = "partitions are retired"

	// openHandler is how long another handler has its transaction open meanwhile.
	openHandler = 1500 * time.Millisecond
)

// inboxsqlPartitioned is the fused inboxsql on a partitioned table.
var inboxsqlPartitioned = variant{partitionedTable, inboxsqlFused.name, true, opened("fused", handlerOn(inboxsql.PartitionedPostgreSQLSchema{IDs: inbox.UUIDv7}))}

// addPartitioned compares messages on a partitioned table with those on a plain one, both with ordered ids.
func (b *bench) addPartitioned(ctx context.Context) error {
	s := &section{name: partitioned, title: fmt.Sprintf("A table partitioned by day: messages relative to a plain table; %s, %s, %s",
		inboxsqlFused.name, orderedIDs.name, networkTitles[direct])}
	plain, err := b.addPlace(ctx, plainTable, true)
	if err != nil {
		return err
	}
	parts, err := b.addPartitionedPlace(ctx, partitionedTable)
	if err != nil {
		return err
	}
	for _, workers := range b.options.workers {
		slice := slice{workers: workers, measured: b.options.slice, newID: orderedIDs.next}
		base := &subject{name: plainTable, rate: func(ctx context.Context) (float64, error) { return slice.rate(ctx, inboxsqlFused, plain.url, plain) }}
		s.groups = append(s.groups, &group{setting: workersSetting(workers), judged: true, subjects: []*subject{base, {
			name: partitionedTable, baseline: base,
			rate: func(ctx context.Context) (float64, error) {
				return slice.rate(ctx, inboxsqlPartitioned, parts.url, parts)
			},
		}}})
	}
	b.add(s)
	return nil
}

// addRetirement looks for the longest message while partitions full of records are retired, beside a handler that has
// its transaction open for long.
func (b *bench) addRetirement(ctx context.Context) error {
	s := &section{name: retirement, unit: " ms", title: fmt.Sprintf("Retirement of partitions with %d records: the longest of all messages, %s, beside an open handler of %s",
		b.options.rows, workersSetting(retentionWorkers), openHandler)}
	p, err := b.addPartitionedPlace(ctx, "retirement")
	if err != nil {
		return err
	}
	longest := func(beside func(context.Context) error) func(context.Context) (float64, error) {
		return func(ctx context.Context) (float64, error) {
			db, err := sql.Open("postgres", p.url)
			if err != nil {
				return 0, err
			}
			defer db.Close()
			all, err := measureLatencies(ctx, inboxsqlPartitioned, p, retentionWorkers, orderedIDs.next, openHandler+time.Second, func(ctx context.Context) error {
				// As a handler that is slow: it has claimed, and so holds a lock on the table.
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				id := newUUIDv7()
				if _, err := tx.ExecContext(ctx, `INSERT INTO watermill_inbox (consumer, message_id) VALUES ('slow', $1)`, id); err != nil {
					return err
				}
				time.AfterFunc(openHandler, func() { _ = tx.Rollback() })
				return beside(context.WithoutCancel(ctx))
			})
			if err != nil {
				return 0, err
			}
			return all.quantile(1), nil
		}
	}
	base := &subject{name: noRetirement, rate: longest(func(context.Context) error { return nil })}
	var took []float64
	retire := &subject{name: retiring, baseline: base, rate: longest(func(ctx context.Context) error {
		began := time.Now()
		defer func() { took = append(took, time.Since(began).Seconds()) }()
		return p.partition(ctx)
	})}
	s.groups = []*group{{
		setting:  longestClaim,
		subjects: []*subject{base, retire},
		before:   func(ctx context.Context) error { return p.fillOldPartition(ctx, b.admin, b.options.rows) },
	}}
	s.notes = append(s.notes, func() string {
		if len(took) == 0 {
			return ""
		}
		return fmt.Sprintf("the longest message while partitions are retired: %s ms; a pass took %s s", spreadOf(retire.rates), spreadOf(took))
	})
	b.add(s)
	return nil
}

func (b *bench) addPartitionedPlace(ctx context.Context, name string) (*place, error) {
	p, err := b.addPlace(ctx, name, true)
	if err != nil {
		return nil, err
	}
	if _, err := b.admin.ExecContext(ctx, fmt.Sprintf(`DROP TABLE %q.watermill_inbox`, p.schema)); err != nil {
		return nil, err
	}
	return p, p.partition(ctx)
}

// partition makes the partitioned table if it is not there, and makes and retires partitions.
func (p *place) partition(ctx context.Context) error {
	db, err := sql.Open("postgres", p.url)
	if err != nil {
		return err
	}
	defer db.Close()
	keeper, err := partitions.New(db, partitions.Options{IDs: inbox.UUIDv7, Retention: 24 * time.Hour})
	if err != nil {
		return err
	}
	_, err = keeper.Pass(ctx)
	return err
}

// fillOldPartition adds a partition that has expired and fills it with records.
func (p *place) fillOldPartition(ctx context.Context, admin *sql.DB, rows int) error {
	day := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, -3)
	name := fmt.Sprintf(`%q.watermill_inbox_old`, p.schema)
	for _, statement := range []string{
		fmt.Sprintf(`CREATE TABLE %s (LIKE %q.watermill_inbox INCLUDING ALL)`, name, p.schema),
		fmt.Sprintf(`INSERT INTO %s (consumer, message_id, processed_at)
			SELECT '%s', %s, t FROM generate_series(1, %d) AS n, LATERAL (SELECT timestamptz '%s' + n * interval '1 microsecond' AS t) AS at`,
			name, expiredConsumer, orderedIDs.sql, rows, day.Format(time.RFC3339)),
		fmt.Sprintf(`ALTER TABLE %q.watermill_inbox ATTACH PARTITION %s FOR VALUES FROM ('%s') TO ('%s')`,
			p.schema, name, inbox.UUIDv7.Bound(day), inbox.UUIDv7.Bound(day.AddDate(0, 0, 1))),
		fmt.Sprintf(`VACUUM (ANALYZE) %s`, name),
	} {
		if _, err := admin.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", statement, err)
		}
	}
	return nil
}
