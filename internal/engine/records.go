package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// MarkSent implements [inbox.Repository].
func (e *Engine) MarkSent(ctx context.Context, records []inbox.Record) (locked []inbox.Record, err error) {
	if len(records) == 0 {
		return nil, nil
	}
	var (
		record    inbox.Record
		claimedAt int64
	)
	query := func(table dialect.Table) dialect.Query { return e.dialect.MarkSent(table, sorted(records)) }
	err = e.look(ctx, query, []any{&record.Key.Consumer, &record.Key.MessageID, &claimedAt}, func() error {
		record.ProcessedAt = time.UnixMicro(claimedAt)
		locked = append(locked, record)
		return nil
	})
	if err != nil {
		return nil, e.failed("mark stored messages as sent", err)
	}
	return locked, nil
}

func sorted(records []inbox.Record) []inbox.Record {
	return slices.SortedFunc(slices.Values(records), inbox.Record.Compare)
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

// Advice implements [inbox.Adviser].
func (e *Engine) Advice(ctx context.Context) ([]string, error) {
	var advice []string
	var sentence string
	err := e.look(ctx, e.dialect.Advice, []any{&sentence}, func() error {
		advice = append(advice, sentence)
		return nil
	})
	if err != nil {
		return nil, e.failed("look at the indexes", err)
	}
	return advice, nil
}

// DeleteProcessed implements [inbox.Records].
func (e *Engine) DeleteProcessed(ctx context.Context, params inbox.DeleteProcessedParams) (deleted int, last time.Time, err error) {
	if err := e.locate(ctx); err != nil {
		return 0, time.Time{}, e.failed("delete processed records", err)
	}
	kept := false
	err = e.Short(ctx, func(tx Tx) error {
		limited, cancel := ctx, func() {}
		if params.Timeout > 0 {
			limited, cancel = context.WithTimeout(ctx, params.Timeout)
		}
		defer cancel()
		var err error
		deleted, last, kept, err = e.deleteProcessed(limited, tx, params)
		if err != nil && ctx.Err() == nil && (limited.Err() != nil || e.dialect.IsTimeout(err)) {
			err = fmt.Errorf("%w: %w", inbox.ErrBatchTimeout, err)
		}
		return err
	})
	switch {
	case err != nil:
		return 0, time.Time{}, e.failed("delete processed records", err)
	case kept:
		return deleted, last, e.failed("delete all processed records", errKept)
	}
	return deleted, last, nil
}

var errKept = errors.New("records are left that nobody has locked: row level security, a trigger or a rule keeps them")

// deleteProcessed reports also whether the database keeps records that are expired and not locked. They were seen before a
// DELETE that deleted nothing: those that are seen after one may have been committed since.
func (e *Engine) deleteProcessed(ctx context.Context, tx Tx, params inbox.DeleteProcessedParams) (deleted int, last time.Time, kept bool, err error) {
	if lock := e.dialect.CleanerLock(e.Table()); lock.Text != "" {
		var locked int
		if err := one(ctx, tx, lock, &locked); err != nil {
			return 0, last, false, err
		}
		if locked == 0 {
			return 0, last, false, inbox.ErrCleaning
		}
	}
	var processedAt int64
	undeleted := e.dialect.Undeleted(e.Table(), params)
	rest := params
	for {
		rest.Limit = params.Limit - deleted
		before := deleted
		err := tx.Query(ctx, e.dialect.DeleteProcessed(e.Table(), rest), []any{&processedAt}, func() error {
			if at := time.UnixMicro(processedAt); deleted == 0 || at.After(last) {
				last = at
			}
			deleted++
			return nil
		})
		if err != nil || deleted == params.Limit || undeleted.Text == "" || kept && deleted > before {
			return deleted, last, false, err
		}
		seen := kept
		var left int
		if err := one(ctx, tx, undeleted, &left); err != nil {
			return deleted, last, false, err
		}
		if kept = left > 0; !kept || seen {
			return deleted, last, kept, nil
		}
	}
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
func (e *Engine) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int) ([]inbox.Record, error) {
	found, err := e.read(ctx, func(table dialect.Table) dialect.Query { return e.dialect.Find(table, selection, after, limit) })
	if err != nil {
		return nil, e.failed("find records", err)
	}
	return found, nil
}

// LeaseUnsent implements [inbox.Records].
func (e *Engine) LeaseUnsent(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int, lease time.Duration) ([]inbox.Record, error) {
	found, err := e.read(ctx, func(table dialect.Table) dialect.Query {
		return e.dialect.LeaseUnsent(table, selection, after, limit, lease)
	})
	if err != nil {
		return nil, e.failed("lease unsent messages", err)
	}
	slices.SortFunc(found, inbox.Record.Compare)
	return found, nil
}

// read reads the records that a query selects.
func (e *Engine) read(ctx context.Context, query func(dialect.Table) dialect.Query) (found []inbox.Record, err error) {
	var (
		record      inbox.Record
		processedAt int64
		stored      = produced{decode: e.dialect.DecodeProduced}
	)
	destinations := []any{&record.Key.Consumer, &record.Key.MessageID, &processedAt, &record.Topic, &stored}
	err = e.look(ctx, query, destinations, func() error {
		record.ProcessedAt, record.Produced = time.UnixMicro(processedAt), stored.bytes
		found = append(found, record)
		return nil
	})
	return found, err
}

// DeleteRecords implements [inbox.Records]. In a transaction, because database/sql repeats a statement of its own whose
// answer is lost, and then knows of no deletion.
func (e *Engine) DeleteRecords(ctx context.Context, found []inbox.Record) (int, error) {
	return e.delete(ctx, "delete records", found, e.dialect.DeleteUnsent, e.dialect.DeleteRecords)
}

// DeleteUnsent implements [inbox.Records].
func (e *Engine) DeleteUnsent(ctx context.Context, found []inbox.Record) (int, error) {
	return e.delete(ctx, "delete unsent messages", found, e.dialect.DeleteUnsent)
}

// delete runs the statements in a transaction and returns how many rows the last one has deleted.
func (e *Engine) delete(ctx context.Context, what string, found []inbox.Record, statements ...func(dialect.Table, []inbox.Record) dialect.Query) (int, error) {
	if len(found) == 0 {
		return 0, nil
	}
	if err := e.locate(ctx); err != nil {
		return 0, e.failed(what, err)
	}
	var deleted int64
	err := e.Short(ctx, func(tx Tx) (err error) {
		for _, statement := range statements {
			query := statement(e.Table(), sorted(found))
			if deleted, err = tx.Exec(ctx, query.Text, query.Args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, e.failed(what, err)
	}
	return int(deleted), nil
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
			c.Oldest, c.Newest = time.Time{}, time.Time{}
			if c.Records > 0 {
				c.Oldest, c.Newest = time.UnixMicro(oldest), time.UnixMicro(newest)
			}
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
