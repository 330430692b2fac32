package main

import (
	"bytes"
	"fmt"
	"image/color"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The chart shows first messages at these workers, and a network.
const (
	chartSection = first + "/" + delayed
	chartWorkers = 4
)

var chartSetting = workersSetting(chartWorkers)

var (
	oursColor   = color.RGBA{0x2f, 0x6f, 0xab, 0xff}
	othersColor = color.RGBA{0xb8, 0xbd, 0xc4, 0xff}
	limitColor  = color.RGBA{0xd9, 0x5f, 0x02, 0xff}
	inkColor    = color.RGBA{0x22, 0x22, 0x22, 0xff}
)

// chartBar is one bar of the chart.
type chartBar struct {
	name  string
	ratio spread
	limit float64 // 0: none
	ours  bool
}

// drawChart writes the chart as SVG.
func drawChart(file string, bars []chartBar) error {
	p, err := chartOf(bars)
	if err != nil {
		return err
	}
	canvas := vgsvg.New(18*vg.Centimeter, (3.9+0.95*vg.Length(len(bars)))*vg.Centimeter)
	margin := vg.Points(8)
	p.Draw(draw.Crop(draw.New(canvas), margin, -margin, margin, -margin))
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return err
	}
	// The library names its own font only; these have the same metrics.
	fonts := bytes.ReplaceAll(svg.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;"))
	return os.WriteFile(file, fonts, 0o644)
}

// chartBars are the inboxes, or nil when not all of them were measured; the one statement is none.
func (b *bench) chartBars() []chartBar {
	var drawn []chartBar
	for _, v := range variants {
		if !v.claims || v.name == oneStatement.name {
			continue
		}
		s := b.subject(chartSection, chartSetting, v.name)
		if s == nil {
			return nil
		}
		bar := chartBar{name: v.name, ratio: spreadOf(s.ratios()), ours: v.name != handWritten.name}
		for _, limit := range bars {
			if limit.section == chartSection && limit.setting == chartSetting && limit.name == v.name {
				bar.limit = limit.limit
			}
		}
		drawn = append(drawn, bar)
	}
	return drawn
}

func chartOf(bars []chartBar) (*plot.Plot, error) {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"}
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Messages per second with an inbox; the same driver's plain transaction is 1\n"+
		"first messages, %d in flight, %s", chartWorkers, networkTitles[delayed])
	p.Title.TextStyle.Font.Size = vg.Points(11)
	p.Title.Padding = vg.Points(8)
	p.X.Label.Text = "bar: median of the rounds; whisker: quartiles; orange: the goal"
	p.X.Label.TextStyle.Font.Size = vg.Points(9)
	p.X.Label.Padding = vg.Points(4)
	p.X.Tick.Marker = plot.TickerFunc(tenths)
	p.Y.Tick.Length, p.Y.LineStyle.Width = 0, 0
	for _, style := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		style.Color = inkColor
	}

	p.Y.Tick.Label.Font.Size = vg.Points(10)
	names := make([]string, len(bars))
	right := 1.0
	for i, bar := range bars {
		row := len(bars) - 1 - i // the first is at the top
		names[row] = bar.name
		if err := addBar(p, bar, float64(row)); err != nil {
			return nil, err
		}
		right = max(right, bar.ratio.high)
	}
	p.NominalY(names...)
	p.Y.Padding = vg.Points(12) // a viewer's font may be wider
	one, err := plotter.NewLine(plotter.XYs{{X: 1, Y: -0.5}, {X: 1, Y: float64(len(bars)) - 0.5}})
	if err != nil {
		return nil, err
	}
	one.Color, one.Dashes = inkColor, []vg.Length{vg.Points(3), vg.Points(3)}
	p.Add(one)
	p.X.Min, p.X.Max = 0, right+0.12 // room for the last figure
	p.Y.Min, p.Y.Max = -0.5, float64(len(bars))-0.5
	return p, nil
}

// addBar adds a bar with its whiskers, its figure and its goal.
func addBar(p *plot.Plot, bar chartBar, row float64) error {
	rect, err := plotter.NewBarChart(plotter.Values{bar.ratio.median}, vg.Points(15))
	if err != nil {
		return err
	}
	rect.Horizontal, rect.XMin, rect.LineStyle.Width, rect.Color = true, row, 0, othersColor
	if bar.ours {
		rect.Color = oursColor
	}
	whiskers, err := plotter.NewXErrorBars(whisker{bar.ratio, row})
	if err != nil {
		return err
	}
	whiskers.Color = inkColor
	figure, err := plotter.NewLabels(plotter.XYLabels{
		XYs:    plotter.XYs{{X: max(bar.ratio.high, bar.limit, 1), Y: row}},
		Labels: []string{fmt.Sprintf("%.2f", bar.ratio.median)},
	})
	if err != nil {
		return err
	}
	figure.Offset.X = vg.Points(5)
	figure.TextStyle[0].Font = p.Y.Tick.Label.Font
	figure.TextStyle[0].YAlign = text.YCenter
	figure.TextStyle[0].Color = inkColor
	p.Add(rect, whiskers, figure)
	if bar.limit == 0 {
		return nil
	}
	limit, err := plotter.NewLine(plotter.XYs{{X: bar.limit, Y: row - 0.42}, {X: bar.limit, Y: row + 0.42}})
	if err != nil {
		return err
	}
	limit.Color, limit.Width = limitColor, vg.Points(2)
	p.Add(limit)
	return nil
}

// whisker is a spread as plotter.NewXErrorBars wants it.
type whisker struct {
	spread
	row float64
}

func (w whisker) Len() int                       { return 1 }
func (w whisker) XY(int) (x, y float64)          { return w.median, w.row }
func (w whisker) XError(int) (low, high float64) { return w.median - w.low, w.high - w.median }

func tenths(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for i := 0; float64(i)/10 <= high; i++ {
		tick := plot.Tick{Value: float64(i) / 10}
		if i%2 == 0 {
			tick.Label = fmt.Sprintf("%.1f", tick.Value)
		}
		ticks = append(ticks, tick)
	}
	return ticks
}
