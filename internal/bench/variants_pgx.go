package main

import (
	"context"
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inboxpgx "github.com/devmappa/watermill-inbox/pgx"
)

var (
	plainPGX = variant{"plain transaction, pgx", "", false, openedPGX(plainPGXHandler)}
	inboxPGX = variant{"inboxpgx", plainPGX.name, true, openedPGX(inboxpgxHandler)}
)

// openedPGX makes a variant's open on a pgxpool.
func openedPGX(handler func(*pgxpool.Pool) (message.NoPublishHandlerFunc, error)) func(context.Context, string, int) (*consumer, error) {
	return func(ctx context.Context, url string, connections int) (*consumer, error) {
		config, err := pgxpool.ParseConfig(url)
		if err != nil {
			return nil, err
		}
		config.MaxConns = int32(connections)
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return nil, err
		}
		c := &consumer{close: pool.Close}
		if c.handle, err = handler(pool); err != nil {
			c.close()
			return nil, err
		}
		return c, nil
	}
}

func plainPGXHandler(pool *pgxpool.Pool) (message.NoPublishHandlerFunc, error) {
	return func(msg *message.Message) error {
		return pgx.BeginFunc(msg.Context(), pool, func(tx pgx.Tx) error { return creditInPGX(tx, msg) })
	}, nil
}

func inboxpgxHandler(pool *pgxpool.Pool) (message.NoPublishHandlerFunc, error) {
	repository, err := inboxpgx.NewRepository(pool, inboxpgx.Options{})
	if err != nil {
		return nil, err
	}
	return withInbox(repository, func(msg *message.Message) error {
		tx, ok := inboxpgx.TxFromContext(msg.Context())
		if !ok {
			return errors.New("no transaction in the context")
		}
		return creditInPGX(tx, msg)
	})
}

func creditInPGX(tx pgx.Tx, msg *message.Message) error {
	id, err := account(msg)
	if err != nil {
		return err
	}
	_, err = tx.Exec(msg.Context(), credit, id)
	return err
}
