package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// What the guard says. The first two are handlers' faults; pgx says "conn busy" to both, in an error that
// looks like a lost connection's.
var (
	errInUse  = errors.New("inboxpgx: the transaction is in use by another goroutine")
	errUnread = errors.New("inboxpgx: rows or batch results of the transaction are not closed")
	errLost   = fmt.Errorf("inboxpgx: the transaction's connection is lost: %w: %w", pgconn.ErrConnClosed, net.ErrClosed)
)

// tx is what the handler gets: pgx's transaction behind a guard. A goroutine that the handler has left
// behind is not in the middle of a method when the transaction ends, and finds it closed afterwards.
type tx struct {
	pgx.Tx
	*guard
}

// guard lets one at a time use a transaction's connection. Who comes second gets an error, as without the
// guard, and waits for nothing: it may be called by the first, as a CopyFromSource is.
type guard struct {
	conn  *pgx.Conn
	mutex sync.Mutex
	over  bool // the connection is somebody else's
}

func (g *guard) enter() error {
	if !g.mutex.TryLock() {
		return errInUse
	}
	err := g.usable()
	if err != nil {
		g.mutex.Unlock()
	}
	return err
}

func (g *guard) leave() { g.mutex.Unlock() }

// usable asks nobody: the server tells its state with each answer. After a handler's ROLLBACK or COMMIT as
// text a statement would run outside of any transaction, or begin another one.
func (g *guard) usable() error {
	conn := g.conn.PgConn()
	switch {
	case g.over:
		return pgx.ErrTxClosed
	case conn.IsClosed():
		return errLost
	case conn.IsBusy():
		return errUnread
	case conn.TxStatus() == 'I':
		return pgx.ErrTxClosed
	}
	return nil
}

// Begin implements pgx.Tx, by a savepoint.
func (t *tx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.enter(); err != nil {
		return nil, err
	}
	defer t.leave()
	nested, err := t.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &tx{Tx: nested, guard: t.guard}, nil
}

// Commit implements pgx.Tx. A handler must not call it, but on a nested transaction.
func (t *tx) Commit(ctx context.Context) error {
	if err := t.enter(); err != nil {
		return err
	}
	defer t.leave()
	return t.Tx.Commit(ctx)
}

// Rollback implements pgx.Tx. A handler must not call it, but on a nested transaction.
func (t *tx) Rollback(ctx context.Context) error {
	if err := t.enter(); err != nil {
		return err
	}
	defer t.leave()
	return t.Tx.Rollback(ctx)
}

// CopyFrom implements pgx.Tx.
func (t *tx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (int64, error) {
	if err := t.enter(); err != nil {
		return 0, err
	}
	defer t.leave()
	return t.Tx.CopyFrom(ctx, table, columns, source)
}

// SendBatch implements pgx.Tx.
func (t *tx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if err := t.enter(); err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	defer t.leave()
	return t.Tx.SendBatch(ctx, batch)
}

// Prepare implements pgx.Tx.
func (t *tx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.enter(); err != nil {
		return nil, err
	}
	defer t.leave()
	return t.Tx.Prepare(ctx, name, sql)
}

// Exec implements pgx.Tx.
func (t *tx) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	if err := t.enter(); err != nil {
		return pgconn.CommandTag{}, err
	}
	defer t.leave()
	return t.Tx.Exec(ctx, sql, arguments...)
}

// Query implements pgx.Tx.
func (t *tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.enter(); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).Query() // rows that report the error
	}
	defer t.leave()
	return t.Tx.Query(ctx, sql, args...)
}

// QueryRow implements pgx.Tx.
func (t *tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.enter(); err != nil {
		return pgx.FailedBatchResults(&pgx.Batch{}, err).QueryRow()
	}
	defer t.leave()
	return t.Tx.QueryRow(ctx, sql, args...)
}
