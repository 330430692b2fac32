package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"

	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib" // driver "pgx"
	"github.com/lib/pq"                // driver "postgres"

	inboxsql "github.com/devmappa/watermill-inbox/sql"
	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

var (
	plainPQ        = variant{"plain transaction, lib/pq", "", false, opened("postgres", plainHandler)}
	handWritten    = variant{"hand-written inbox, lib/pq", plainPQ.name, true, opened("postgres", handWrittenHandler)}
	inboxsqlPQ     = variant{"inboxsql, lib/pq", plainPQ.name, true, opened("postgres", inboxsqlHandler)}
	inboxsqlFused  = variant{"inboxsql, lib/pq, fused", plainPQ.name, true, opened("fused", inboxsqlHandler)}
	oneStatement   = variant{"one statement, no handler, lib/pq", plainPQ.name, true, opened("postgres", oneStatementHandler)}
	plainStdlib    = variant{"plain transaction, pgx stdlib", "", false, opened("pgx", plainHandler)}
	inboxsqlStdlib = variant{"inboxsql, pgx stdlib", plainStdlib.name, true, opened("pgx", inboxsqlHandler)}
)

// opened makes a variant's open on database/sql.
func opened(driver string, handler func(*sql.DB) (message.NoPublishHandlerFunc, error)) func(context.Context, string, int) (*consumer, error) {
	return func(_ context.Context, url string, connections int) (*consumer, error) {
		db, err := openDB(driver, url)
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(connections)
		db.SetMaxIdleConns(connections)
		c := &consumer{close: func() { _ = db.Close() }}
		if c.handle, err = handler(db); err != nil {
			c.close()
			return nil, err
		}
		return c, nil
	}
}

func openDB(driver, url string) (*sql.DB, error) {
	if driver != "fused" {
		return sql.Open(driver, url)
	}
	connector, err := pq.NewConnector(url)
	if err != nil {
		return nil, err
	}
	fused, err := inboxpq.NewConnector(connector)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(fused), nil
}

func plainHandler(db *sql.DB) (message.NoPublishHandlerFunc, error) {
	return func(msg *message.Message) error {
		tx, err := db.BeginTx(msg.Context(), nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := creditIn(tx, msg); err != nil {
			return err
		}
		return tx.Commit()
	}, nil
}

// handWrittenHandler is an inbox as people write it.
func handWrittenHandler(db *sql.DB) (message.NoPublishHandlerFunc, error) {
	return func(msg *message.Message) error {
		tx, err := db.BeginTx(msg.Context(), nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		result, err := tx.ExecContext(msg.Context(),
			`INSERT INTO watermill_inbox (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING`, consumerName, msg.UUID)
		if err != nil {
			return err
		}
		if inserted, err := result.RowsAffected(); err != nil || inserted == 0 {
			return err
		}
		if err := creditIn(tx, msg); err != nil {
			return err
		}
		return tx.Commit()
	}, nil
}

var inboxsqlHandler = handlerOn(inboxsql.DefaultPostgreSQLSchema{})

// handlerOn is the inbox on a table of the adapter's kind.
func handlerOn(adapter inboxsql.SchemaAdapter) func(*sql.DB) (message.NoPublishHandlerFunc, error) {
	return func(db *sql.DB) (message.NoPublishHandlerFunc, error) {
		repository, err := inboxsql.NewRepository(db, inboxsql.Options{SchemaAdapter: adapter})
		if err != nil {
			return nil, err
		}
		return withInbox(repository, func(msg *message.Message) error {
			tx, ok := inboxsql.TxFromContext(msg.Context())
			if !ok {
				return errors.New("no transaction in the context")
			}
			return creditIn(tx, msg)
		})
	}
}

func creditIn(tx *sql.Tx, msg *message.Message) error {
	id, err := account(msg)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(msg.Context(), credit, id)
	return err
}

// oneStatementHandler claims and credits in one round trip: the floor, which leaves no room for a handler.
func oneStatementHandler(db *sql.DB) (message.NoPublishHandlerFunc, error) {
	return func(msg *message.Message) error {
		id, err := account(msg)
		if err != nil {
			return err
		}
		_, err = db.ExecContext(msg.Context(), fmt.Sprintf(`
			WITH claim AS (
				INSERT INTO watermill_inbox (consumer, message_id) VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING 1
			)
			UPDATE accounts SET balance = balance + 1 WHERE id = %s AND EXISTS (SELECT FROM claim)`,
			pq.QuoteLiteral(consumerName), pq.QuoteLiteral(msg.UUID), strconv.Itoa(id)))
		return err
	}, nil
}
