package inboxsql

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Consumers implements [inbox.Records].
func (r *Repository) Consumers(ctx context.Context) (consumers []string, now time.Time, err error) {
	if err := r.find(ctx); err != nil {
		return nil, time.Time{}, fmt.Errorf("inboxsql: cannot list the consumers: %w", err)
	}
	err = r.rows(ctx, r.schema.ConsumersQuery(CheckParams{Table: r.table()}), func(rows *sql.Rows) error {
		var (
			consumer     string
			microseconds int64
		)
		if err := rows.Scan(&consumer, &microseconds); err != nil {
			return err
		}
		now = time.UnixMicro(microseconds)
		if consumer != "" {
			consumers = append(consumers, consumer)
		}
		return nil
	})
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("inboxsql: cannot list the consumers: %w", err)
	}
	return consumers, now, nil
}

// DeleteProcessed implements [inbox.Records].
func (r *Repository) DeleteProcessed(ctx context.Context, consumer string, from, before time.Time, limit int) (deleted int, last time.Time, err error) {
	if err := r.find(ctx); err != nil {
		return 0, time.Time{}, fmt.Errorf("inboxsql: cannot delete processed records: %w", err)
	}
	err = r.short(ctx, func(tx *sql.Tx) error {
		if lock := r.schema.CleanerLockQuery(CheckParams{Table: r.table()}); lock.Query != "" {
			var locked int
			if err := tx.QueryRowContext(ctx, lock.Query, lock.Args...).Scan(&locked); err != nil {
				return err
			}
			if locked == 0 {
				return inbox.ErrCleaning
			}
		}
		query := r.schema.DeleteProcessedQuery(DeleteProcessedParams{Table: r.table(), Consumer: consumer, From: from, Before: before, Limit: limit})
		return eachRow(ctx, tx, query, func(rows *sql.Rows) error {
			var processedAt int64
			err := rows.Scan(&processedAt)
			if at := time.UnixMicro(processedAt); deleted == 0 || at.After(last) {
				last = at
			}
			deleted++
			return err
		})
	})
	if err != nil {
		return 0, time.Time{}, fmt.Errorf("inboxsql: cannot delete processed records: %w", err)
	}
	return deleted, last, nil
}

// short runs a transaction that is over soon.
func (r *Repository) short(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := do(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// CountRecords implements [inbox.Records].
func (r *Repository) CountRecords(ctx context.Context, selection inbox.Selection) (count int, err error) {
	if err := r.find(ctx); err != nil {
		return 0, fmt.Errorf("inboxsql: cannot count records: %w", err)
	}
	query := r.schema.CountQuery(CountParams{Table: r.table(), Selection: selection})
	if err := r.db.QueryRowContext(ctx, query.Query, query.Args...).Scan(&count); err != nil {
		return 0, fmt.Errorf("inboxsql: cannot count records: %w", err)
	}
	return count, nil
}

// FindRecords implements [inbox.Records].
func (r *Repository) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Key, limit int, each func(inbox.Key, inbox.Record)) error {
	if err := r.find(ctx); err != nil {
		return fmt.Errorf("inboxsql: cannot find records: %w", err)
	}
	query := r.schema.FindQuery(FindParams{Table: r.table(), Selection: selection, After: after, Limit: limit})
	err := r.rows(ctx, query, func(rows *sql.Rows) error {
		var (
			key         inbox.Key
			processedAt int64
			produced    []byte
		)
		if err := rows.Scan(&key.Consumer, &key.MessageID, &processedAt, &produced); err != nil {
			return err
		}
		each(key, inbox.Record{ProcessedAt: time.UnixMicro(processedAt), Produced: produced})
		return nil
	})
	if err != nil {
		return fmt.Errorf("inboxsql: cannot find records: %w", err)
	}
	return nil
}

// DeleteRecords implements [inbox.Records].
func (r *Repository) DeleteRecords(ctx context.Context, found []inbox.Found) (deleted int, err error) {
	if len(found) == 0 {
		return 0, nil
	}
	if err := r.find(ctx); err != nil {
		return 0, fmt.Errorf("inboxsql: cannot delete records: %w", err)
	}
	deleted, err = affected(r.db.ExecContext)(ctx, r.schema.DeleteRecordsQuery(DeleteRecordsParams{Table: r.table(), Found: found}))
	if err != nil {
		return 0, fmt.Errorf("inboxsql: cannot delete records: %w", err)
	}
	return deleted, nil
}

// Statistics implements [inbox.Records].
func (r *Repository) Statistics(ctx context.Context) (statistics inbox.Statistics, err error) {
	if err := r.find(ctx); err != nil {
		return inbox.Statistics{}, fmt.Errorf("inboxsql: cannot read statistics: %w", err)
	}
	err = r.rows(ctx, r.schema.StatisticsQuery(CheckParams{Table: r.table()}), func(rows *sql.Rows) error {
		var (
			c              inbox.ConsumerStatistics
			oldest, newest int64
			bytes          int64
		)
		if err := rows.Scan(&c.Consumer, &c.Records, &c.Unsent, &oldest, &newest, &c.LastDay, &bytes); err != nil {
			return err
		}
		if c.Consumer == "" {
			statistics.Bytes = bytes
			return nil
		}
		c.Oldest, c.Newest = time.UnixMicro(oldest), time.UnixMicro(newest)
		statistics.Consumers = append(statistics.Consumers, c)
		return nil
	})
	if err != nil {
		return inbox.Statistics{}, fmt.Errorf("inboxsql: cannot read statistics: %w", err)
	}
	return statistics, nil
}

// rows calls the function for each row of a query on the pool.
func (r *Repository) rows(ctx context.Context, query Query, each func(*sql.Rows) error) error {
	return eachRow(ctx, r.db, query, each)
}

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func eachRow(ctx context.Context, q queryer, query Query, each func(*sql.Rows) error) error {
	rows, err := q.QueryContext(ctx, query.Query, query.Args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := each(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// affected returns a function that runs a statement and tells how many rows it has affected.
func affected(exec func(context.Context, string, ...any) (sql.Result, error)) func(context.Context, Query) (int, error) {
	return func(ctx context.Context, query Query) (int, error) {
		result, err := exec(ctx, query.Query, query.Args...)
		if err != nil {
			return 0, err
		}
		n, err := result.RowsAffected()
		return int(n), err
	}
}
