// Package sqlpool lets internal/engine work on database/sql. It links no driver.
package sqlpool

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"reflect"

	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// Pool is an [engine.Pool] on a *sql.DB.
type Pool struct {
	db        *sql.DB
	txOptions *sql.TxOptions
	driver    engine.Driver
}

var (
	_ engine.Pool = (*Pool)(nil)
	_ engine.Tx   = (*Tx)(nil)
)

// New returns the pool. Messages' transactions are opened with the options.
func New(db *sql.DB, txOptions *sql.TxOptions) *Pool {
	_, fuses := db.Driver().(FusingDriver)
	return &Pool{db: db, txOptions: txOptions, driver: engine.Driver{NoticesEnd: fuses || isPQ(db.Driver()), Fuses: fuses}}
}

// isPQ reports whether the driver is lib/pq itself. It refuses to commit a transaction that has failed or ended;
// pgx's database/sql driver commits what a ROLLBACK sent as text has ended, and of others nothing is known.
func isPQ(d driver.Driver) bool {
	t := reflect.TypeOf(d)
	return t != nil && t.Kind() == reflect.Pointer && t.Elem().PkgPath() == "github.com/lib/pq"
}

// Driver implements [engine.Pool].
func (p *Pool) Driver() engine.Driver { return p.driver }

// Begin implements [engine.Pool].
func (p *Pool) Begin(ctx context.Context, opening engine.Opening) (engine.Tx, int64, error) {
	if p.driver.Fuses && opening.Guarded.Text != "" {
		first := &FirstStatement{Guarded: opening.Guarded.Text, Plain: opening.First.Text}
		tx, err := p.db.BeginTx(context.WithValue(ctx, firstStatementContextKey{}, first), p.txOptions)
		if err != nil {
			return nil, 0, err
		}
		return &Tx{Tx: tx, noticesEnd: true}, first.Affected, nil
	}
	tx, err := p.db.BeginTx(ctx, p.txOptions)
	if err != nil {
		return nil, 0, err
	}
	t := &Tx{Tx: tx, noticesEnd: p.driver.NoticesEnd}
	affected, err := t.Exec(ctx, opening.First.Text, opening.First.Args...)
	if err != nil {
		_ = t.Rollback() // the error says more
		return nil, 0, err
	}
	return t, affected, nil
}

// BeginShort implements [engine.Pool].
func (p *Pool) BeginShort(ctx context.Context) (engine.Tx, error) {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &Tx{Tx: tx, noticesEnd: p.driver.NoticesEnd}, nil
}

// Exec implements [engine.Executor].
func (p *Pool) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return exec(ctx, p.db, statement, args)
}

// Query implements [engine.Executor].
func (p *Pool) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	return read(ctx, p.db, query, destinations, each)
}

// Tx is an [engine.Tx] on a *sql.Tx, which is the handler's.
type Tx struct {
	*sql.Tx
	noticesEnd bool
}

// Exec implements [engine.Executor].
func (t *Tx) Exec(ctx context.Context, statement string, args ...any) (int64, error) {
	return exec(ctx, t.Tx, statement, args)
}

// Query implements [engine.Executor].
func (t *Tx) Query(ctx context.Context, query dialect.Query, destinations []any, each func() error) error {
	return read(ctx, t.Tx, query, destinations, each)
}

// Commit implements [engine.Tx]. *sql.Tx takes no context here.
func (t *Tx) Commit(context.Context) error { return t.Tx.Commit() }

// Rollback implements [engine.Tx]. There is nothing to do when database/sql has rolled back because the context
// has ended.
func (t *Tx) Rollback() error {
	if err := t.Tx.Rollback(); err != nil && !errors.Is(err, sql.ErrTxDone) {
		return err
	}
	return nil
}

// IsBroken implements [engine.Tx]. Lib/pq refuses by itself to commit what has failed or ended, with errors that have
// no code and no type; every other error of its Commit is the server's, the network's or database/sql's.
func (t *Tx) IsBroken(err error) bool {
	if errors.Is(err, driver.ErrBadConn) {
		return false
	}
	if errors.Is(err, sql.ErrTxDone) {
		return true
	}
	var (
		server  interface{ SQLState() string }
		network net.Error
	)
	return t.noticesEnd && !errors.As(err, &server) && !errors.As(err, &network) &&
		!errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, net.ErrClosed) &&
		!errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func exec(ctx context.Context, on execer, statement string, args []any) (int64, error) {
	result, err := on.ExecContext(ctx, statement, args...)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func read(ctx context.Context, on queryer, query dialect.Query, destinations []any, each func() error) error {
	rows, err := on.QueryContext(ctx, query.Text, query.Args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(destinations...); err != nil {
			return err
		}
		if err := each(); err != nil {
			return err
		}
	}
	return rows.Err()
}
