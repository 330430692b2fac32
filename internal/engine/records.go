package engine

import (
	"context"
	"errors"
	"slices"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// MarkSent implements [inbox.Repository].
func (e *Engine) MarkSent(ctx context.Context, records []inbox.Record) error {
	if len(records) == 0 {
		return nil
	}
	query := e.dialect.MarkSent(e.Table(), sorted(records))
	if _, err := e.pool.Exec(ctx, query.Text, query.Args...); err != nil {
		return e.failed("mark stored messages as sent", err)
	}
	return nil
}

func sorted(records []inbox.Record) []inbox.Record {
	return slices.SortedFunc(slices.Values(records), func(a, b inbox.Record) int { return a.Key.Compare(b.Key) })
}

// Consumers implements [inbox.Records].
func (e *Engine) Consumers(ctx context.Context) (consumers []string, now time.Time, err error) {
	var (
		consumer     string
		microseconds int64
	)
	err = e.look(ctx, e.dialect.Consumers, []any{&consumer, &microseconds}, func() error {
		now = time.UnixMicro(microseconds)
		if consumer != "" {
			consumers = append(consumers, consumer)
		}
		return nil
	})
	if err != nil {
		return nil, time.Time{}, e.failed("list the consumers", err)
	}
	return consumers, now, nil
}

// DeleteProcessed implements [inbox.Records].
func (e *Engine) DeleteProcessed(ctx context.Context, consumer string, from, before time.Time, limit int) (deleted int, last time.Time, err error) {
	if err := e.locate(ctx); err != nil {
		return 0, time.Time{}, e.failed("delete processed records", err)
	}
	err = e.Short(ctx, func(tx Tx) error {
		if lock := e.dialect.CleanerLock(e.Table()); lock.Text != "" {
			var locked int
			if err := one(ctx, tx, lock, &locked); err != nil {
				return err
			}
			if locked == 0 {
				return inbox.ErrCleaning
			}
		}
		var processedAt int64
		query := e.dialect.DeleteProcessed(e.Table(), dialect.DeleteProcessedParams{Consumer: consumer, From: from, Before: before, Limit: limit})
		return tx.Query(ctx, query, []any{&processedAt}, func() error {
			if at := time.UnixMicro(processedAt); deleted == 0 || at.After(last) {
				last = at
			}
			deleted++
			return nil
		})
	})
	if err != nil {
		return 0, time.Time{}, e.failed("delete processed records", err)
	}
	return deleted, last, nil
}

// CountRecords implements [inbox.Records].
func (e *Engine) CountRecords(ctx context.Context, selection inbox.Selection) (count int, err error) {
	query := func(table dialect.Table) dialect.Query { return e.dialect.Count(table, selection) }
	if err := e.look(ctx, query, []any{&count}, func() error { return nil }); err != nil {
		return 0, e.failed("count records", err)
	}
	return count, nil
}

// Look implements [inbox.Looker].
func (e *Engine) Look(ctx context.Context, params inbox.ClaimParams) (*inbox.Record, error) {
	if err := e.locate(ctx); err != nil {
		return nil, e.failed("look for a record", err)
	}
	record, err := e.record(ctx, e.pool, params.Key)
	if err != nil && !errors.Is(err, errNoRow) {
		return nil, e.failed("look for a record", err)
	}
	return record, nil
}

// FindRecords implements [inbox.Records].
func (e *Engine) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Key, limit int) (found []inbox.Record, err error) {
	var (
		record      inbox.Record
		processedAt int64
	)
	query := func(table dialect.Table) dialect.Query { return e.dialect.Find(table, selection, after, limit) }
	err = e.look(ctx, query, []any{&record.Key.Consumer, &record.Key.MessageID, &processedAt, &record.Produced}, func() error {
		record.ProcessedAt = time.UnixMicro(processedAt)
		found = append(found, record)
		record.Produced = nil // its bytes are the found record's
		return nil
	})
	if err != nil {
		return nil, e.failed("find records", err)
	}
	return found, nil
}

// DeleteRecords implements [inbox.Records].
func (e *Engine) DeleteRecords(ctx context.Context, found []inbox.Record) (deleted int, err error) {
	if len(found) == 0 {
		return 0, nil
	}
	if err := e.locate(ctx); err != nil {
		return 0, e.failed("delete records", err)
	}
	query := e.dialect.DeleteRecords(e.Table(), found)
	n, err := e.pool.Exec(ctx, query.Text, query.Args...)
	if err != nil {
		return 0, e.failed("delete records", err)
	}
	return int(n), nil
}

// Statistics implements [inbox.Records].
func (e *Engine) Statistics(ctx context.Context, consumers inbox.Consumers) (statistics inbox.Statistics, err error) {
	var (
		c              inbox.ConsumerStatistics
		oldest, newest int64
		bytes          int64
	)
	destinations := []any{&c.Consumer, &c.Records, &c.Unsent, &oldest, &newest, &c.LastDay, &bytes}
	err = e.look(ctx, e.dialect.Statistics, destinations, func() error {
		if c.Consumer == "" {
			statistics.Bytes = bytes
			return nil
		}
		if consumers.Contains(c.Consumer) {
			c.Oldest, c.Newest = time.UnixMicro(oldest), time.UnixMicro(newest)
			statistics.Consumers = append(statistics.Consumers, c)
		}
		return nil
	})
	if err != nil {
		return inbox.Statistics{}, e.failed("read statistics", err)
	}
	return statistics, nil
}

// look runs a query on the located table.
func (e *Engine) look(ctx context.Context, query func(dialect.Table) dialect.Query, destinations []any, each func() error) error {
	if err := e.locate(ctx); err != nil {
		return err
	}
	return e.pool.Query(ctx, query(e.Table()), destinations, each)
}
