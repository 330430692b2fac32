package inboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	inbox "github.com/devmappa/watermill-inbox"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

// Consumers implements [inbox.Records].
func (r *Repository) Consumers(ctx context.Context) (consumers []string, now time.Time, err error) {
	var (
		consumer     string
		microseconds int64
	)
	if err := r.find(ctx); err != nil {
		return nil, time.Time{}, fmt.Errorf("inboxpgx: cannot list the consumers: %w", err)
	}
	query := r.schema.ConsumersQuery(inboxsql.CheckParams{Table: r.table()})
	err = r.read(ctx, query, []any{&consumer, &microseconds}, func() {
		now = time.UnixMicro(microseconds)
		if consumer != "" {
			consumers = append(consumers, consumer)
		}
	})
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("inboxpgx: cannot list the consumers: %w", err)
	}
	return consumers, now, nil
}

// DeleteProcessed implements [inbox.Records].
func (r *Repository) DeleteProcessed(ctx context.Context, consumer string, from, before time.Time, limit int) (deleted int, last time.Time, err error) {
	if err := r.find(ctx); err != nil {
		return 0, time.Time{}, fmt.Errorf("inboxpgx: cannot delete processed records: %w", err)
	}
	err = pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
		var locked int32
		lock := r.schema.CleanerLockQuery(inboxsql.CheckParams{Table: r.table()})
		if err := read(ctx, tx.Conn(), lock, []any{&locked}, func() {}); err != nil {
			return err
		}
		if locked == 0 {
			return inbox.ErrCleaning
		}
		var processedAt int64
		return read(ctx, tx.Conn(), r.schema.DeleteProcessedQuery(inboxsql.DeleteProcessedParams{
			Table: r.table(), Consumer: consumer, From: from, Before: before, Limit: limit,
		}), []any{&processedAt}, func() {
			if at := time.UnixMicro(processedAt); deleted == 0 || at.After(last) {
				last = at
			}
			deleted++
		})
	})
	if err != nil {
		return 0, time.Time{}, fmt.Errorf("inboxpgx: cannot delete processed records: %w", err)
	}
	return deleted, last, nil
}

// CountRecords implements [inbox.Records].
func (r *Repository) CountRecords(ctx context.Context, selection inbox.Selection) (int, error) {
	var count int64
	if err := r.find(ctx); err != nil {
		return 0, fmt.Errorf("inboxpgx: cannot count records: %w", err)
	}
	query := r.schema.CountQuery(inboxsql.CountParams{Table: r.table(), Selection: selection})
	if err := r.read(ctx, query, []any{&count}, func() {}); err != nil {
		return 0, fmt.Errorf("inboxpgx: cannot count records: %w", err)
	}
	return int(count), nil
}

// FindRecords implements [inbox.Records].
func (r *Repository) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Key, limit int, each func(inbox.Key, inbox.Record)) error {
	var (
		key         inbox.Key
		processedAt int64
		produced    []byte
	)
	if err := r.find(ctx); err != nil {
		return fmt.Errorf("inboxpgx: cannot find records: %w", err)
	}
	query := r.schema.FindQuery(inboxsql.FindParams{Table: r.table(), Selection: selection, After: after, Limit: limit})
	err := r.read(ctx, query, []any{&key.Consumer, &key.MessageID, &processedAt, &produced}, func() {
		each(key, inbox.Record{ProcessedAt: time.UnixMicro(processedAt), Produced: produced})
	})
	if err != nil {
		return fmt.Errorf("inboxpgx: cannot find records: %w", err)
	}
	return nil
}

// DeleteRecords implements [inbox.Records].
func (r *Repository) DeleteRecords(ctx context.Context, found []inbox.Found) (int, error) {
	if len(found) == 0 {
		return 0, nil
	}
	if err := r.find(ctx); err != nil {
		return 0, fmt.Errorf("inboxpgx: cannot delete records: %w", err)
	}
	query := r.schema.DeleteRecordsQuery(inboxsql.DeleteRecordsParams{Table: r.table(), Found: found})
	tag, err := r.pool.Exec(ctx, query.Query)
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: cannot delete records: %w", err)
	}
	return int(tag.RowsAffected()), nil
}

// Statistics implements [inbox.Records].
func (r *Repository) Statistics(ctx context.Context) (inbox.Statistics, error) {
	var (
		statistics     inbox.Statistics
		c              inbox.ConsumerStatistics
		oldest, newest int64
		bytes          int64
	)
	if err := r.find(ctx); err != nil {
		return inbox.Statistics{}, fmt.Errorf("inboxpgx: cannot read statistics: %w", err)
	}
	query := r.schema.StatisticsQuery(inboxsql.CheckParams{Table: r.table()})
	err := r.read(ctx, query, []any{&c.Consumer, &c.Records, &c.Unsent, &oldest, &newest, &c.LastDay, &bytes}, func() {
		if c.Consumer == "" {
			statistics.Bytes = bytes
			return
		}
		c.Oldest, c.Newest = time.UnixMicro(oldest), time.UnixMicro(newest)
		statistics.Consumers = append(statistics.Consumers, c)
	})
	if err != nil {
		return inbox.Statistics{}, fmt.Errorf("inboxpgx: cannot read statistics: %w", err)
	}
	return statistics, nil
}
